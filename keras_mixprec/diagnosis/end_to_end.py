"""How far the loss and the gradients of a whole model are from float32's."""

import math
from typing import Any, NamedTuple

import keras

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.loss_check import loss_error
from keras_mixprec.diagnosis.moves import mover
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.dtypes import following
from keras_mixprec.numerics.jitter import jittered


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

    Attributes:
        finite: Boolean. Whether the float32 losses and gradients are.
    """

    def __init__(
        self, model: keras.Model, batches: list, loss_scale_bits: float = 0.0
    ):
        self._model = model
        self._batches = batches
        self._scale = 2.0**loss_scale_bits
        self.refresh()

    def refresh(self):
        """Computes the float32 reference anew, as after changes of weights."""
        self._references = [_reference(self._model, b) for b in self._batches]
        self.finite = all(_is_finite(r.exact) for r in self._references)

    def errors(self, assignment: dict) -> Errors:
        """Returns the worst errors over all batches.

        Args:
            assignment: Dict of policy name to the list of layers that follow
                it meanwhile; all others do as they do now.
        """
        losses, gradients = [], []
        for batch, reference in zip(
            self._batches, self._references, strict=True
        ):
            try:
                with following(assignment):
                    step = dry_step(
                        self._model,
                        batch,
                        self._scale,
                        draws=reference.exact.draws,
                    )
            # Each backend has a type of its own for dtypes that do not mix.
            except Exception:
                return Errors(math.nan, math.nan)
            losses.append(_loss_error(step, reference))
            gradients.append(_gradient_error(step, self._scale, reference))
        return Errors(max(losses), max(gradients))


class _Reference(NamedTuple):
    """What float32 gives for one batch.

    Attributes:
        exact: `DryStep`, without the calls, which hold all activations.
        settled: Set of what is compared: ids of variables, and `"loss"`.
        owners: Dict from the id of a variable to that of its layer.
    """

    exact: DryStep
    settled: set[Any]
    owners: dict[int, int]


def _reference(model, batch):
    exact = exact_step(model, batch)._replace(calls=[])
    settled = _moving(model, exact) | {"loss"}
    for seed in range(thresholds.LOSS_JITTERS):
        with jittered(model, seed):
            other = exact_step(model, batch, exact.draws)
        settled = {key for key in settled if not _differ(key, other, exact)}
    owners = {
        id(variable): id(layer)
        for layer in model._flatten_layers()
        for variable in layer._trainable_variables
    }
    return _Reference(exact, settled, owners)


def _moving(model, exact):
    """Ids of the variables that their gradients would move."""
    moves = mover(model)
    return {
        id(variable)
        for variable in model.trainable_variables
        if id(variable) in exact.gradients
        and moves(variable, to_array(exact.gradients[id(variable)]))
    }


def _differ(key, other, exact):
    if key == "loss":
        error = loss_error(other.loss, exact.loss)
        return error > thresholds.LOSS_ERROR
    pair = other.gradients[key], exact.gradients[key]
    error = relative_error(*([to_array(g)] for g in pair))
    return error > thresholds.SETTLED_GRADIENT


def _is_finite(exact):
    gradients = [to_array(g) for g in exact.gradients.values()]
    return math.isfinite(exact.loss) and not nonfinite(gradients)


def _loss_error(step, reference):
    error = loss_error(step.loss, reference.exact.loss)
    if "loss" in reference.settled or math.isinf(error):
        return error
    return 0.0


def _gradient_error(step, scale, reference):
    layers = {}
    for key, gradient in reference.exact.gradients.items():
        exact = to_array(gradient)
        low = to_array(step.gradients[key]) / scale
        if nonfinite([low]) > nonfinite([exact]):
            return math.inf
        if key in reference.settled:
            layers.setdefault(reference.owners[key], []).append((low, exact))
    errors = [
        relative_error(*zip(*own, strict=True)) for own in layers.values()
    ]
    return max(errors, default=0.0)
