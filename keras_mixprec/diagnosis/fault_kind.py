"""Which kind of fault it is where a layer's outputs or gradients are wrong.

Weights that its dtype does not hold are a kind of their own. Of the other four
that a layer can have, an overflow is a number beyond the
format's maximum, an underflow one that becomes 0, and a loss of precision
neither. What is not finite in 16 bits although everything inside of the layer
would fit starts from a zero, as in `1 / x` or `log(x)`. Where that
happens among operations, `numerics/layer_replay.py` finds. Faults of the loss
itself, behind all layers, are decided in `range_fault` and `loss_fault.py`.
"""

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import rounded_integers
from keras_mixprec.diagnosis.scales import ScaleWindow
from keras_mixprec.diagnosis.weights import weight_fault
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import to_array
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
    if numbers["largest_input"] > limit:
        return "cast_overflow"
    inputs = [to_array(x) for x in replay.inputs]
    if rounded := rounded_integers(inputs, dtype):
        numbers |= rounded
        return "precision_loss"
    if spoilt := weight_fault(replay, exact, numbers):
        return spoilt
    zeros = nonfinite(low) and replay.starts_from_zero()
    largest_inside = replay.largest_intermediate()
    overflows = largest_inside > limit
    if zeros and not (overflows and replay.nothing_vanishes()):
        return "underflow"
    numbers["largest_inside_in_float32"] = largest_inside
    if overflows:
        return "forward_overflow"
    wider = relative_error(replay.forward("mixed_bfloat16"), exact)
    if wider > thresholds.FORWARD_ERROR:
        return "precision_loss"
    vanished = any(
        ((a == 0) & (b != 0)).any() for a, b in zip(low, exact, strict=True)
    )
    # A sum that overflows on the way to a mean shows in no other number.
    if any(np.isinf(a).any() for a in low):
        return "forward_overflow"
    return "underflow" if nonfinite(low) or vanished else "precision_loss"


def kind_over_draws(replay: LayerReplay, low, numbers: dict) -> str:
    """Returns the same of a layer that returns something else each time.

    Args:
        replay: `LayerReplay` of the layer.
        low: As for `kind_of_outputs`.
        numbers: As for `kind_of_outputs`.
    """
    numbers["largest_inside_in_float32"] = replay.largest_intermediate()
    if numbers["largest_inside_in_float32"] > limit_of(replay):
        return "forward_overflow"
    return "underflow" if nonfinite(low) else "precision_loss"


def kind_of_gradients(replay: LayerReplay, cotangents, low) -> str:
    """Returns what is wrong with the gradients of a layer.

    Args:
        replay: `LayerReplay` of the layer.
        cotangents: List of arrays, what the gradients are computed from.
        low: List of arrays, the gradients as the layer computes them.
    """
    if not nonfinite(low):
        return "precision_loss"
    zero = replay.gradients_start_from_zero(cotangents)
    return "underflow" if zero else "backward_overflow"


def kind_of_window(window: ScaleWindow, bits: float) -> str:
    """Returns what a loss scale does to gradients that it does not suit.

    Args:
        window: `ScaleWindow` of the gradients, which does not hold the scale.
        bits: Float. The loss scale, as a power of two.
    """
    return "underflow" if bits < window.low else "backward_overflow"
