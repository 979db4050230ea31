"""Whether a loss is wrong, and what goes wrong in it."""

import math
from collections.abc import Callable

import keras
from keras import tree

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.forward import (
    is_cast_before,
    range_fault,
)
from keras_mixprec.numerics.arrays import is_float, jittered
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import compiled_loss
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.layer_reference import (
    Twin,
    nonfinite_places,
    starts_from_zero,
)


def loss_error(loss: float, exact: float) -> float:
    """Returns the share by which a loss is off, infinite if it is no number."""
    if not math.isfinite(loss):
        return math.inf
    return abs(loss - exact) / max(abs(exact), 1e-30)


class LossCheck:
    """Compares 16-bit losses with float32 ones of several like models.

    The loss of a chaotic model, such as a deep one that normalizes over a
    batch of four, is off by 10% if any rounding is different. So each
    comparison is repeated with weights that are off by half a float16 ulp.

    Args:
        model: A built `keras.Model`.
        low: Function of a list of layers: the loss with those in float32.
        exact: Function without arguments: the loss in float32.
    """

    def __init__(
        self,
        model,
        low: Callable[[list], float],
        exact: Callable[[], float],
    ):
        self._model = model
        self._low = low
        self._exact = exact

    def wrong(self, demoted: list) -> bool:
        """Whether the loss is wrong however the weights are rounded."""
        return all(e > thresholds.LOSS_ERROR for e in self._errors(demoted))

    def right(self, demoted: list) -> bool:
        """Whether the loss is right however the weights are rounded."""
        return all(e <= thresholds.LOSS_ERROR for e in self._errors(demoted))

    def _errors(self, demoted):
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                yield loss_error(self._low(demoted), self._exact())


def right_in_xla(model, data) -> bool:
    """Whether the loss of a step is right when XLA compiles it.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
    """
    low = compiled_loss(model, data)
    # It may draw other random numbers than single operations do.
    with computing_in("float32", with_sublayers(model)):
        exact = compiled_loss(model, data)
    return loss_error(low, exact) <= thresholds.LOSS_ERROR


def fault_behind(
    twin: Twin, known: LayerCall | None, model: keras.Model, data, calls
) -> tuple[str, str]:
    """Returns kind and direction of what is not finite behind a layer.

    Where a float32 output of the layer repairs it: what the loss does with the
    outputs, else what the layer does.

    Args:
        twin: `Twin` of the layer.
        known: As for `range_fault`.
        model: As for `loss_fault`.
        data: As for `loss_fault`.
        calls: As for `loss_fault`.
    """
    fault = loss_fault(model, data, calls)
    if fault is None or is_cast_before(twin.call, known):
        fault = range_fault(twin, known)
    return fault


def loss_fault(model: keras.Model, data, calls) -> tuple[str, str] | None:
    """Returns kind and direction of what makes the loss non-finite.

    A `compute_loss` of the user's own, or a loss that casts, computes in the
    dtype of the outputs: `exp(20)` overflows there, and `log(1 - p)` is that
    of 0. The operations of the loss, run again on the model's outputs, tell.

    Args:
        model: A compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        calls: List of `LayerCall` of a step in 16 bits.

    Returns:
        `None` if the loss is finite as `compute_loss` has it, or a `train_step`
        of the user's own computes it.
    """
    # A `train_step` of the user's own computes what it likes.
    if type(model).train_step is not keras.Model.train_step:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    outputs = [call.outputs for call in calls if call.layer is model]
    if not outputs:  # JAX calls no more than the model's `call`.
        with keras.StatelessScope():
            outputs = [model(x)]
    leaves = tree.flatten(outputs[-1])
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]

    def run(tensors):
        given = list(leaves)
        for position, tensor in zip(floats, tensors, strict=True):
            given[position] = tensor
        predicted = tree.pack_sequence_as(outputs[-1], given)
        # Which metrics it updates is of no matter.
        with keras.StatelessScope():
            return model.compute_loss(x, y, predicted, sample_weight)

    tensors = [leaves[i] for i in floats]
    if not nonfinite_places(run, tensors):
        return None
    if starts_from_zero(run, tensors):
        return "underflow", "forward"
    return "forward_overflow", "forward"
