"""What goes wrong in a loss that is computed from 16-bit outputs."""

import keras
from keras import tree

from keras_mixprec.diagnosis.forward_judgement import (
    is_cast_before,
    range_fault,
)
from keras_mixprec.numerics.arrays import is_float
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.operations import nonfinite_places, starts_from_zero
from keras_mixprec.numerics.twin import Twin


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
