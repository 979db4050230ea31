"""Compares a run with the same run in float32.

An error counts if it exceeds a limit and also eight times the float32 noise.
The noise is the change of the float32 result when weights and inputs are off by
half a rounding step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.keras_internals import flat_layers, own_trainable, part_for
from keras_mixprec.numerics.arrays import (
    count_nonfinite,
    largest_magnitude,
    to_array,
)
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.forward_pass import ForwardPass
from keras_mixprec.numerics.rounding import jittered, rounded_otherwise
from keras_mixprec.policies.layers import has_own_step

# A float32 sum of squares is precise enough between these two limits.
_SQUARES = 1e-20, 1e30


def relative_error(
    low: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> float:
    """Returns `|low - exact| / |exact|` over all arrays together.

    Args:
        low: Arrays from the 16-bit run.
        exact: Arrays of the same shapes from the float32 run.

    Returns:
        Float >= 0; infinite if `low` has a non-finite element where `exact`
        has none. Elements where float32 is not finite do not count.
    """
    off, size = 0.0, 0.0
    for narrow, wide in zip(low, exact, strict=True):
        with np.errstate(all="ignore"):
            norms = norm(narrow - wide), norm(wide)
        if not math.isfinite(norms[0]):
            usable = np.isfinite(wide)
            narrow, wide = (a[usable].astype("float64") for a in (narrow, wide))
            if not np.isfinite(narrow).all():
                return math.inf
            norms = norm(narrow - wide), norm(wide)
        off, size = math.hypot(off, norms[0]), math.hypot(size, norms[1])
    if size == 0.0:
        return math.inf if off else 0.0
    return off / size


def output_error(
    low: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> float:
    """Returns the relative error of the worst output of a model.

    A number that stands for minus infinity, as in masked scores, may become
    infinite in 16 bits.

    Args:
        low: Arrays from the 16-bit run.
        exact: Arrays from the float32 run.

    Returns:
        Float >= 0, as `relative_error`. If the shapes differ, as for a varying
        number of detected boxes, only non-finite outputs count.
    """
    if [a.shape for a in low] != [a.shape for a in exact]:
        return math.inf if nonfinite(low) and not nonfinite(exact) else 0.0

    def error(narrow, wide):
        mask = np.isneginf(narrow) & (wide <= thresholds.MINUS_INFINITY)
        return relative_error([np.where(mask, wide, narrow)], [wide])

    return max(map(error, low, exact), default=0.0)


def pass_error(low: ForwardPass, exact: ForwardPass) -> float:
    """Returns the relative error of the worst output of a forward pass.

    Once the 16-bit run chooses a different token than float32, only infinities
    and NaNs count.

    Args:
        low: `ForwardPass` in 16 bits.
        exact: `ForwardPass` in float32.
    """
    pairs = [*zip(low.histories, exact.histories, strict=False)]
    same = [a == b for a, b in pairs]
    count = same.index(False) if False in same else len(low.outputs)
    later = [
        [np.isnan(a).any() or np.isposinf(a).any() for a in run.outputs[count:]]
        for run in (low, exact)
    ]
    if any(later[0]) and not any(later[1]):
        return math.inf
    return output_error(low.outputs[:count], exact.outputs[:count])


def largest(arrays: Sequence[np.ndarray]) -> float:
    """Returns the largest finite magnitude, or 0."""
    return max(map(largest_magnitude, arrays), default=0.0)


def nonfinite(arrays: Sequence[np.ndarray]) -> int:
    """Returns the number of elements that are infinite or NaN."""
    return sum(map(count_nonfinite, arrays))


def norm(values: np.ndarray) -> float:
    """Returns the Euclidean norm of an array of any shape."""
    # NumPy sums in pairs, so float32 is precise enough. Avoid `np.linalg.norm`,
    # which takes 5 ms on a busy machine because its threads wait for each
    # other.
    squares = float(np.square(values).sum())
    if not _SQUARES[0] < squares < _SQUARES[1]:
        squares = float(np.square(values, dtype="float64").sum())
    return math.sqrt(squares)


def effective_update(model) -> Callable:
    """Returns a function that tells if a gradient would change its variable.

    The function takes the variable and its gradient as an array. It assumes
    the model's optimizer in float32.

    Args:
        model: A compiled `keras.Model`.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def effective(variable, gradient):
        own = part_for(inner, variable)
        epsilon = getattr(own, "epsilon", None)
        size = largest_magnitude(gradient)
        if isinstance(epsilon, float):
            return size >= thresholds.SHARE_OF_EPSILON * epsilon
        weight = largest_magnitude(to_array(variable.value))
        rate = 1.0 if own is None else float(to_array(own.learning_rate))
        return rate * size >= thresholds.SHARE_OF_WEIGHT * weight

    return effective


# The name of the main part that a criterion compares: the loss of a step, or
# the outputs of a call.
RESULT = "result"


class Errors(NamedTuple):
    """The relative errors of a step, compared with the step in float32.

    An error is infinite if a number is non-finite in 16 bits only.

    Attributes:
        loss: Float. The relative error of the loss.
        gradient: Float. The relative error of the layer with the worst
            gradient, all its variables together.
    """

    loss: float
    gradient: float

    def within(self, loss: float, gradient: float) -> bool:
        """Returns whether both errors are within limits."""
        return self.loss <= loss and self.gradient <= gradient


class Criterion:
    """Compares runs of a model with its float32 run, part by part.

    Args:
        exact: The run in float32.
        rounded: Function of a seed. It returns a float32 run whose weights and
            inputs are off by half a rounding step.
        distances: Function of two runs. It returns a dict from the name of
            each part to its relative error.
        result: Float. The limit for the error of the result.
        others: Float. The limit for the error of any other part.
    """

    def __init__(
        self,
        exact,
        rounded: Callable,
        distances: Callable,
        result: float = thresholds.LOSS_ERROR,
        others: float = thresholds.BACKWARD_ERROR,
    ):
        self._exact = exact
        self._rounded = rounded
        self._distances = distances
        self._limits = {RESULT: result}
        self._others = others

    @functools.cached_property
    def noise(self) -> dict:
        """The relative error that rounding alone causes in each part."""
        noise: dict = {}
        for seed in range(thresholds.JITTERS):
            moved = self._distances(self._rounded(seed), self._exact)
            for part, distance in moved.items():
                noise[part] = max(distance, noise.get(part, 0.0))
        return noise

    def errors(self, run) -> dict:
        """Returns each part's relative error, or 0 if the error is noise."""
        found = self._distances(run, self._exact)
        return {part: self._counted(part, e) for part, e in found.items()}

    def fits(self, run) -> bool:
        """Returns whether a run is as good as in float32."""
        found = self.errors(run).items()
        return all(error <= self._limit_of(part) for part, error in found)

    def _counted(self, part, error):
        # Measuring the noise takes several steps, so measure the noise only if
        # the error is above its limit.
        if error <= self._limit_of(part) or not math.isfinite(error):
            return error
        noise = self.noise[part]
        is_beyond = error > thresholds.BEYOND_NOISE * noise
        return error if noise < thresholds.ALL_NOISE and is_beyond else 0.0

    def _limit_of(self, part):
        return self._limits.get(part, self._others)


def step_criterion(
    model: keras.Model,
    batch,
    exact: DryStep | None = None,
    **limits: float,
) -> Criterion:
    """Returns the criterion of a step: its loss, and each layer's gradient.

    The error of a layer's gradient covers all its variables. For example,
    TensorFlow on a CPU sums bias gradients in float16. In a model that trained
    well, such gradients were 59% off. A gradient that would not change its
    variable only has to be finite.

    Args:
        model: A built and compiled `keras.Model`.
        batch: As `train_step` takes it.
        exact: `DryStep` of the batch in float32, at loss scale 1. Defaults to
            `None`, which runs this step.
        **limits: As for `Criterion`.
    """
    exact = exact or exact_step(model, batch)
    moving = _moving(model, exact)
    owners = {
        id(variable): id(layer)
        for layer in flat_layers(model)
        for variable in own_trainable(layer)
    }

    def rounded(seed):
        with jittered(model, seed):
            other = rounded_otherwise(batch, seed)
            return exact_step(model, other, records=False)

    def distances(step, exact):
        layers: dict = {}
        for key, gradient in exact.gradients.items():
            wide = to_array(gradient)
            low = np.full_like(wide, np.inf)
            if key in step.gradients:
                low = to_array(step.gradients[key]) / np.float32(step.scale)
            if key not in moving:
                low, wide = low * 0, wide * 0
            own = layers.setdefault(owners.get(key, key), [])
            own.append((low, wide))
        found = {
            k: relative_error(*zip(*v, strict=True)) for k, v in layers.items()
        }
        losses = (np.array(s.loss) for s in (step, exact))
        return found | {RESULT: relative_error(*([x] for x in losses))}

    # Drop the recorded calls, because they keep all activations in memory.
    exact = exact._replace(calls=[])
    return Criterion(exact, rounded, distances, **limits)


def worst_errors(model: keras.Model, criteria: list, scale: float) -> Errors:
    """Returns the worst errors of the steps on several batches.

    The errors are NaN if a step raises, as when it mixes dtypes.

    Args:
        model: As for `step_criterion`.
        criteria: List of pairs of a batch and its `Criterion`.
        scale: Float. The loss scale.
    """
    try:
        found = [
            own.errors(dry_step(model, batch, scale, records=False))
            for batch, own in criteria
        ]
    except active.replay().REFUSALS:
        return Errors(math.nan, math.nan)
    return Errors(
        max(errors[RESULT] for errors in found),
        max(
            (e for errors in found for k, e in errors.items() if k != RESULT),
            default=0.0,
        ),
    )


def _moving(model, exact):
    """Returns the ids of the variables that their gradients would change."""
    effective = effective_update(model)
    return {
        id(variable)
        for variable in model.trainable_variables
        if id(variable) in exact.gradients
        and effective(variable, to_array(exact.gradients[id(variable)]))
    }


def not_finite_in(model: keras.Model, exact: DryStep) -> dict:
    """Returns evidence of a step that is not finite in float32."""
    if not math.isfinite(exact.loss):
        return {"not_finite": "loss"}
    arrays = [to_array(g) for g in exact.gradients.values()]
    count = sum(nonfinite([array]) > 0 for array in arrays)
    numbers = {"not_finite": "gradients", "variables": count}
    inside = [
        to_array(gradient)
        for call in exact.calls
        for gradient in call.cotangents + call.input_cotangents
        if gradient is not None
    ]
    if has_own_step(model) and inside and not nonfinite(inside):
        numbers["made_in"] = "train_step"
    return numbers


def is_finite(exact: DryStep) -> bool:
    """Returns whether the loss and all gradients of a step are finite."""
    gradients = [to_array(g) for g in exact.gradients.values()]
    return math.isfinite(exact.loss) and not nonfinite(gradients)
