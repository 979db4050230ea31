"""How far a run is from the same run in float32, and whether that counts.

An error counts if it exceeds a limit, and eight times what float32 itself
changes by when weights and inputs are off by half a rounding step.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import (
    effective_update,
    nonfinite,
    relative_error,
)
from keras_mixprec.keras_internals import flat_layers, own_trainable
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.rounding import jittered, rounded_otherwise
from keras_mixprec.policies.layers import has_own_step

_LOSS = "loss"


class Errors(NamedTuple):
    """How far a step is from the same step in float32.

    Attributes:
        loss: Float. The relative error of the loss.
        gradient: Float. The relative error of the layer whose gradient is
            furthest off, all its variables together.

    An error is infinite if something is not finite that is in float32.
    """

    loss: float
    gradient: float

    @classmethod
    def of(cls, errors: dict) -> "Errors":
        """Returns the errors of a step, as from its `Criterion`."""
        others = [e for part, e in errors.items() if part != _LOSS]
        return cls(errors[_LOSS], max(others, default=0.0))

    def within(self, loss: float, gradient: float) -> bool:
        """Returns whether the step runs and both errors are small enough."""
        return self.loss <= loss and self.gradient <= gradient


class Criterion:
    """Compares runs of a model with the one in float32, part by part.

    Args:
        exact: The run in float32.
        rounded: Function of a seed. It returns the float32 run with weights and
            inputs that are off by half a rounding step.
        distances: Function of two runs. It returns a dict from the name of
            each part to its relative error.
        limits: Dict from the name of a part to the error that it may have.
        limit: Float. The error that any other part may have.
    """

    def __init__(
        self,
        exact,
        rounded: Callable,
        distances: Callable,
        limits: dict,
        limit: float,
    ):
        self._exact = exact
        self._rounded = rounded
        self._distances = distances
        self._limits = limits
        self._limit = limit

    @functools.cached_property
    def noise(self) -> dict:
        """How far rounding moves each part, as relative errors."""
        noise: dict = {}
        for seed in range(thresholds.JITTERS):
            moved = self._distances(self._rounded(seed), self._exact)
            for part, distance in moved.items():
                noise[part] = max(distance, noise.get(part, 0.0))
        return noise

    def errors(self, run) -> dict:
        """Returns the relative errors that count, 0 for the others."""
        found = self._distances(run, self._exact)
        return {part: self._counted(part, e) for part, e in found.items()}

    def fits(self, run) -> bool:
        """Returns whether a run is as good as in float32."""
        found = self.errors(run).items()
        return all(error <= self._limit_of(part) for part, error in found)

    def _counted(self, part, error):
        # Rounding is measured only in doubt, because it takes several steps.
        if error <= self._limit_of(part) or not math.isfinite(error):
            return error
        noise = self.noise[part]
        is_beyond = error > thresholds.BEYOND_NOISE * noise
        return error if noise < thresholds.ALL_NOISE and is_beyond else 0.0

    def _limit_of(self, part):
        return self._limits.get(part, self._limit)


def step_criterion(
    model: keras.Model,
    batch,
    exact: DryStep | None = None,
    loss: float = thresholds.LOSS_ERROR,
    gradient: float = thresholds.BACKWARD_ERROR,
) -> Criterion:
    """Returns the criterion of a step: its loss, and each layer's gradient.

    Not each variable's: TensorFlow on a CPU sums the gradients of biases in
    float16, 59% off in a model that trains as in float32. A gradient that would
    not move its variable only has to be finite.

    Args:
        model: A built and compiled `keras.Model`.
        batch: As `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1. Defaults to `None`,
            which computes it.
        loss: Float. The relative error that the loss may have.
        gradient: Float. The same of a layer's gradient.
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
        return found | {_LOSS: relative_error(*([x] for x in losses))}

    # The calls hold all activations, so drop them.
    exact = exact._replace(calls=[])
    return Criterion(exact, rounded, distances, {_LOSS: loss}, gradient)


def worst_errors(model: keras.Model, criteria: list, scale: float) -> Errors:
    """Returns the worst errors of the steps on several batches.

    NaN if a step does not run: TensorFlow and torch refuse to mix some dtypes.

    Args:
        model: As for `step_criterion`.
        criteria: List of pairs of a batch and its `Criterion`.
        scale: Float. The loss scale.
    """
    try:
        found = [
            Errors.of(own.errors(dry_step(model, batch, scale, records=False)))
            for batch, own in criteria
        ]
    except active.replay().REFUSALS:
        return Errors(math.nan, math.nan)
    return Errors(*map(max, zip(*found, strict=True)))


def _moving(model, exact):
    """Ids of the variables that their gradients would move."""
    effective = effective_update(model)
    return {
        id(variable)
        for variable in model.trainable_variables
        if id(variable) in exact.gradients
        and effective(variable, to_array(exact.gradients[id(variable)]))
    }


def not_finite_in(model: keras.Model, exact: DryStep) -> dict:
    """Returns what of a step is not finite, as the numbers of a verdict."""
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
    """Returns whether the loss and all gradients of a step are."""
    gradients = [to_array(g) for g in exact.gradients.values()]
    return math.isfinite(exact.loss) and not nonfinite(gradients)
