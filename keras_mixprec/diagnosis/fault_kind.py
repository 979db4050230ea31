"""Which kind of fault it is where a layer's outputs or gradients are wrong.

Weights that the dtype cannot hold are a kind of their own. A layer can have
four others. An overflow is a number beyond the format's maximum, an underflow
is a number that becomes 0, and a loss of precision is neither. A number that
becomes 0 may make others non-finite, as in `1 / x` or `log(x)`. This is an
underflow, unless the 0 comes from an infinity. `numerics/layer_replay.py` finds
where that happens among operations. `range_fault` and `loss_fault.py` decide
about faults of the loss itself, behind all layers.
"""

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import largest, nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import rounded_integers
from keras_mixprec.diagnosis.scales import ScaleWindow
from keras_mixprec.diagnosis.weights import weight_fault
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.layer_replay import LayerReplay


def limit_of(replay: LayerReplay) -> float:
    """Returns the maximum of the format that a layer computes in."""
    return get_format(replay.call.layer.compute_dtype).maximum


def kind_of_outputs(replay: LayerReplay, low, exact, numbers: dict) -> str:
    """Returns what is wrong with the outputs of a layer.

    Args:
        replay: `LayerReplay` of the layer.
        low: List of arrays, the outputs as the layer computes them.
        exact: List of arrays, the same in float32.
        numbers: Dict, the evidence; what is found out here is added.
    """
    limit, dtype = limit_of(replay), replay.call.layer.compute_dtype
    if largest(replay.cast_inputs) > limit:
        return "cast_overflow"
    if rounded := rounded_integers(replay.cast_inputs, dtype):
        numbers |= rounded
        return "precision_loss"
    if spoilt := weight_fault(replay, exact, numbers):
        return spoilt
    cause = replay.cause_of_nonfinite() if nonfinite(low) else None
    largest_inside = replay.largest_intermediate()
    kind = "forward_overflow"
    if cause is not None:
        numbers |= cause.evidence
    if cause and cause.kind == "underflow":
        kind = "underflow"
    elif largest_inside <= limit:
        kind = _kind_where_all_fits(replay, low, exact)
    if kind == "underflow":
        _add_smallest(numbers, replay)
    else:
        numbers["largest_inside_in_float32"] = largest_inside
    return kind


def _kind_where_all_fits(replay, low, exact):
    """Returns the kind if float32 meets no number beyond the format."""
    wider = relative_error(replay.forward("mixed_bfloat16"), exact)
    if wider > thresholds.FORWARD_ERROR:
        return "precision_loss"
    # A sum that overflows on the way to a mean shows in no other number.
    if any(np.isinf(a).any() for a in low):
        return "forward_overflow"
    vanished = any(
        ((a == 0) & (b != 0)).any() for a, b in zip(low, exact, strict=True)
    )
    return "underflow" if nonfinite(low) or vanished else "precision_loss"


def _add_smallest(numbers, replay, cotangents=None):
    """Shows what vanishes, in place of the largest numbers, which fit."""
    for name in ("largest_input", "largest_gradient_in_float32"):
        numbers.pop(name, None)
    smallest = replay.smallest_intermediate(cotangents)
    numbers["smallest_inside_in_float32"] = smallest


def kind_of_gradients(
    replay: LayerReplay, cotangents, low, numbers: dict
) -> str:
    """Returns what is wrong with the gradients of a layer.

    Args:
        replay: `LayerReplay` of the layer.
        cotangents: List of arrays, what the gradients are computed from.
        low: List of arrays, the gradients as the layer computes them.
        numbers: As for `kind_of_outputs`.
    """
    if not nonfinite(low):
        return "precision_loss"
    cause = replay.cause_of_nonfinite(cotangents)
    if cause is not None:
        numbers |= cause.evidence
    if cause is None or cause.kind != "underflow":
        return "backward_overflow"
    _add_smallest(numbers, replay, cotangents)
    return "underflow"


def kind_of_window(window: ScaleWindow, bits: float) -> str:
    """Returns what a loss scale does to gradients that it does not suit.

    Args:
        window: `ScaleWindow` of the gradients, which does not hold the scale.
        bits: Float. The loss scale, as a power of two.
    """
    return "underflow" if bits < window.low else "backward_overflow"
