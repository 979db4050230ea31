"""Checks a layer's outputs in 16 bits."""

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import (
    largest,
    nonfinite,
    relative_error,
)
from keras_mixprec.diagnosis.culprit import Culprit, Fault
from keras_mixprec.diagnosis.fault_kind import kind_of_outputs
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.layer_hooks import with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay

# The same number as for rows with bad data.
_ROWS_NAMED = 8


def check_forward(call: LayerCall, compiled: bool) -> Culprit | None:
    """Compares what a layer returned with the same layer in float32.

    Args:
        call: `LayerCall`, of a layer that computes in 16 bits.
        compiled: Boolean, whether XLA compiles the model's step.

    Returns:
        The `Culprit` if the relative error is too large. `None` if it is not,
        or if the inputs are not finite.
    """
    replay = LayerReplay(call, compiled)
    if nonfinite([to_array(x) for x in replay.inputs]):
        return None
    exact = replay.forward("float32")
    low = low_outputs(replay, compiled)
    error = relative_error(low, exact)
    if error <= thresholds.FORWARD_ERROR:
        return None
    numbers = _numbers(replay, error, low, exact)
    rows = _rows([to_array(x) for x in replay.inputs], low, exact)
    if rows:
        numbers["batch_rows"] = rows[:_ROWS_NAMED]
        if len(rows) > _ROWS_NAMED:
            numbers["batch_rows_in_all"] = len(rows)
    kind = kind_of_outputs(replay, low, exact, numbers)
    layers = with_sublayers(call.layer)
    return Culprit(call.path, layers, kind, "forward", numbers)


def _numbers(replay, error, low, exact):
    return {
        "error": error,
        "largest_input": largest([to_array(x) for x in replay.inputs]),
        "largest_output_in_float32": largest(exact),
        "nonfinite_outputs": nonfinite(low),
    }


def low_outputs(replay: LayerReplay, compiled: bool) -> list:
    """Returns what a layer computes as it is, as arrays."""
    if compiled:
        return replay.forward()
    return [to_array(x) for x in replay.call.float_outputs]


def range_fault(
    replay: LayerReplay, reference: LayerCall | None = None
) -> Fault:
    """Returns what makes a loss infinite but no output.

    Args:
        replay: `LayerReplay` of a layer without which the loss is finite.
        reference: `LayerCall`, the same one in float32; `None` if it is not
            known.
    """
    kind = range_kind(replay, reference)
    if kind != "underflow":
        return Fault(kind, "forward")
    limit = get_format("float16").maximum
    # A gradient that is part of the loss, such as a penalty on its norm: what
    # a cotangent of one becomes in this layer, as near to the maximum as a
    # scale window ends.
    ones = [np.ones(x.shape) for x in replay.forward("float32")]
    gradient = largest(replay.gradients(ones, "float32"))
    if gradient * 2**thresholds.BITS_ABOVE > limit:
        return Fault("backward_overflow", "backward")
    return Fault(kind, "forward")


def range_kind(replay: LayerReplay, reference: LayerCall | None = None) -> str:
    """Kind of what makes a result infinite but no output of a layer.

    Args:
        replay: As for `range_fault`.
        reference: As for `range_fault`.
    """
    if is_cast_before(replay.call, reference):
        return "cast_overflow"
    large = replay.largest_intermediate() > get_format("float16").maximum
    return "forward_overflow" if large else "underflow"


def is_cast_before(call: LayerCall, reference: LayerCall | None) -> bool:
    """Returns whether an input overflows in a cast before the layer is called.

    As a `Sequential` without a `keras.Input` casts what it is given.

    Args:
        call: `LayerCall` of a step in 16 bits.
        reference: As for `range_fault`.
    """
    if reference is None or not nonfinite(_inputs(call)):
        return False
    return largest(_inputs(reference)) > get_format("float16").maximum


def _inputs(call):
    return [to_array(x) for x in LayerReplay(call).inputs]


def _rows(inputs, low, exact):
    """The rows that are not finite, if not all are, where there are rows."""
    if len({len(x) if x.ndim else 0 for x in [*inputs, *low]}) != 1:
        return []
    bad = [
        (np.isfinite(b) & ~np.isfinite(a)).reshape(len(a), -1).any(axis=1)
        for a, b in zip(low, exact, strict=True)
    ]
    found = np.flatnonzero(np.any(bad, axis=0)).tolist()
    return found if len(found) < len(low[0]) else []
