"""How far a whole model's loss and gradients are from float32's, and why."""

import functools
import math
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
from keras_mixprec.numerics.dry_step import (
    DryStep,
    dry_step,
    exact_step,
)
from keras_mixprec.numerics.layer_hooks import (
    temporary_policies,
)
from keras_mixprec.numerics.rounding import jittered, rounded_otherwise
from keras_mixprec.policies.layers import has_own_step


def loss_error(loss: float, exact: float) -> float:
    """Returns the share by which a loss is off, infinite if it is no number."""
    if not math.isfinite(loss):
        return math.inf
    return abs(loss - exact) / max(abs(exact), 1e-30)


class Errors(NamedTuple):
    """How far a step is from the same step in float32.

    Attributes:
        loss: Float. Share by which the loss is off.
        gradient: Float. Share by which the gradient is off of the layer that
            is worst off, all its variables together.

    One is infinite if there is something non-finite that float32 has not.
    Both are NaN if the step does not run: TensorFlow and torch refuse to mix
    some dtypes within a layer of the user's own.
    """

    loss: float
    gradient: float

    def within(self, loss: float, gradient: float) -> bool:
        """Whether the step runs and neither exceeds its tolerance."""
        return self.loss <= loss and self.gradient <= gradient


class EndToEnd:
    """Compares steps of a model in other policies with float32 ones.

    Each layer's gradient is compared by itself, so that one that is all wrong
    does not hide behind a larger one. (Not each variable's: TensorFlow on a
    CPU sums the gradients of biases in float16, 59% off in a model that trains
    as in float32.) Not compared is what cannot be
    right in any 16-bit precision or does not matter, unless it is non-finite:
    a loss or gradient that is another one in float32 too if the weights are
    off by half a float16 ulp (as the gradient of the bias before a
    normalization, which is nothing but rounding), and a gradient that would
    not move its variable.

    Nothing is changed in the model.

    Args:
        model: A built and compiled `keras.Model`.
        batches: List of batches, as `train_step` takes them.
        loss_scale_bits: Float. The loss scale, as a power of two.
    """

    def __init__(
        self, model: keras.Model, batches: list, loss_scale_bits: float = 0.0
    ):
        self._model = model
        self._batches = batches
        self._scale = 2.0**loss_scale_bits
        self._references = [Reference(model, batch) for batch in batches]
        for reference in self._references:
            reference.noise  # noqa: B018  As the weights are now.

    @property
    def finite(self) -> bool:
        """Whether the float32 losses and gradients are."""
        return all(is_finite(r.exact) for r in self._references)

    def errors(self, assignment: dict) -> Errors:
        """Returns the worst errors over all batches.

        Args:
            assignment: Dict of policy name to the list of layers that follow
                it meanwhile; all others do as they do now.
        """
        found = []
        for batch, reference in zip(
            self._batches, self._references, strict=True
        ):
            try:
                with temporary_policies(assignment):
                    step = dry_step(
                        self._model, batch, self._scale, records=False
                    )
            except active.replay().REFUSALS:
                return Errors(math.nan, math.nan)
            found.append(reference.errors(step))
        return Errors(*map(max, zip(*found, strict=True)))


class Reference:
    """What float32 gives for one batch, and what of it counts.

    Args:
        model: A built and compiled `keras.Model`.
        batch: As `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1. Defaults to `None`,
            which computes it.

    Attributes:
        exact: The `DryStep`, without the calls, which hold all activations.
    """

    def __init__(self, model: keras.Model, batch, exact: DryStep | None = None):
        exact = exact or exact_step(model, batch)
        self.exact = exact._replace(calls=[])
        self._model = model
        self._batch = batch
        self._counts = _moving(model, exact) | {"loss"}
        self._owners = {
            id(variable): id(layer)
            for layer in flat_layers(model)
            for variable in own_trainable(layer)
        }

    @functools.cached_property
    def noise(self):
        """How far roundings of weights and inputs move each part, by its id."""
        noise = dict.fromkeys(self._counts, 0.0)
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                batch = rounded_otherwise(self._batch, seed)
                other = exact_step(self._model, batch, records=False)
            for key in noise:
                noise[key] = max(noise[key], _distance(key, other, self.exact))
        return noise

    def _counting(self, step, exact):
        """What is resolved, or much further off than roundings move it."""
        limits = {"loss": thresholds.LOSS_ERROR}
        resolved = thresholds.RESOLVED_GRADIENT
        return {
            key
            for key, own in self.noise.items()
            if own <= limits.get(key, resolved)
            or own < thresholds.ALL_NOISE
            and _distance(key, step, exact) > thresholds.BEYOND_NOISE * own
        }

    def errors(self, step: DryStep) -> Errors:
        """Returns how far a step is off in what is resolved."""
        return self.compare(step, self.exact)

    def compare(self, step: DryStep, exact: DryStep) -> Errors:
        """Returns how far two steps are apart in what is resolved."""
        return self._errors(step, exact, self._counting(step, exact))

    def is_like(self, step: DryStep) -> bool:
        """Whether a step is as good as in float32.

        Only if there is doubt it is computed what is resolved.

        Args:
            step: `DryStep`.
        """
        limits = thresholds.LOSS_ERROR, thresholds.BACKWARD_ERROR
        doubtful = not self._errors(step, self.exact, self._counts).within(
            *limits
        )
        return not doubtful or self.errors(step).within(*limits)

    def _errors(self, step, exact, counted):
        loss = loss_error(step.loss, exact.loss)
        if "loss" not in counted and math.isfinite(loss):
            loss = 0.0
        return Errors(loss, self._gradient_error(step, exact, counted))

    def _gradient_error(self, step, exact, counted):
        layers = {}
        for key, gradient in exact.gradients.items():
            if key not in step.gradients:
                continue  # It applies none at this scale.
            wide = to_array(gradient)
            low = to_array(step.gradients[key]) / np.float32(step.scale)
            if nonfinite([low]) > nonfinite([wide]):
                return math.inf
            if key in counted:
                owner = self._owners.get(key, key)
                layers.setdefault(owner, []).append((low, wide))
        errors = [
            relative_error(*zip(*own, strict=True)) for own in layers.values()
        ]
        return max(errors, default=0.0)


def _moving(model, exact):
    """Ids of the variables that their gradients would move."""
    effective = effective_update(model)
    return {
        id(variable)
        for variable in model.trainable_variables
        if id(variable) in exact.gradients
        and effective(variable, to_array(exact.gradients[id(variable)]))
    }


def _distance(key, step, exact):
    if key == "loss":
        return loss_error(step.loss, exact.loss)
    if key not in step.gradients:
        return 0.0
    low, wide = (to_array(s.gradients[key]) for s in (step, exact))
    return relative_error([low / np.float32(step.scale)], [wide])


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
    """Whether the loss and all gradients of a step are."""
    gradients = [to_array(g) for g in exact.gradients.values()]
    return math.isfinite(exact.loss) and not nonfinite(gradients)
