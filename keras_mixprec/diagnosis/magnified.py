"""Rounding errors that a later layer magnifies."""

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import DryStep


def lost_shares(step: DryStep, exact: DryStep) -> dict:
    """Returns what share is lost of what a layer returned, where it counts.

    A position of 3001 that is rounded to 3000 is off by 0.03%; less 3000, by
    all of it. The loss need not show that before the model has learned all
    else. Scales and shifts of features are no loss: the next layer adapts.

    Args:
        step: `DryStep` in 16 bits, with its calls.
        exact: `DryStep` in float32, with its calls.

    Returns:
        Dict from the names of calls to floats.
    """
    known = {call.name: call for call in exact.calls}
    return {
        call.name: _lost_in(call, known[call.name])
        for call in step.calls
        if call.name in known
    }


def _lost_in(call: LayerCall, known: LayerCall) -> float:
    low, exact = _outputs(call), _outputs(known)
    # What is not finite shows in the loss, or is a mask.
    if [a.shape for a in low] != [a.shape for a in exact] or nonfinite(low):
        return 0.0
    cotangents = known.float_cotangents
    if any(c is not None for c in cotangents):
        low = [*map(_where_it_counts, low, exact, cotangents)]
    error = relative_error(low, exact)
    if error <= thresholds.LOSS_ERROR:
        return error
    return relative_error([*map(_adapted, low, exact)], exact)


def _outputs(call):
    return [to_array(x) for x in call.float_outputs]


def _where_it_counts(low, exact, cotangent):
    counts = 0 if cotangent is None else to_array(cotangent)
    return np.where(counts != 0, low, exact)


def _adapted(low, exact):
    """What a scale and a shift of each feature make of a result, at best."""
    axes = tuple(range(low.ndim - 1)) if low.ndim > 1 else None
    low, exact = low.astype("float64"), exact.astype("float64")
    mean = exact.mean(axes, keepdims=True)
    off = low - low.mean(axes, keepdims=True)
    alike = (off * (exact - mean)).sum(axes, keepdims=True)
    size = np.square(off).sum(axes, keepdims=True)
    return mean + off * alike / np.maximum(size, np.finfo("float64").tiny)
