"""Which layers inside of one to demote so that it comes out right."""

import keras
import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import relative_error
from keras_mixprec.numerics.dtypes import with_sublayers
from keras_mixprec.numerics.twin import Twin


def smallest_cure(twin: Twin, exact: list[np.ndarray], kind: str) -> list:
    """Returns the layer alone where that is enough, else what it takes.

    For the cast of an input it is: then what is inside has a finite input,
    and is judged by itself.

    Args:
        twin: `Twin` of a call that comes out wrong.
        exact: List of arrays, what it returns in float32.
        kind: String. The kind of the fault.
    """
    alone = [twin.call.layer]
    if with_sublayers(twin.call.layer) == alone:
        return alone
    error = _error(twin, exact, alone)
    if error is None:
        return without_needless(twin, exact)
    enough = error <= thresholds.FORWARD_ERROR or kind == "cast_overflow"
    if enough:
        return alone
    layers = without_needless(twin, exact)
    if isinstance(layers[0], keras.Model) and len(layers) > 1:
        # Its code computes in the dtype of what layers return: mostly these
        # few are enough.
        error = _error(twin, exact, layers[1:])
        if error is not None and error <= thresholds.FORWARD_ERROR:
            return layers[1:]
    return layers


def without_needless(twin: Twin, exact: list[np.ndarray]) -> list:
    """Returns the layer and those inside it that make it come out right.

    Args:
        twin: `Twin` of a call.
        exact: List of arrays, what it returns in float32.
    """
    layers = with_sublayers(twin.call.layer)
    for sublayer in layers[1:]:
        inside = {id(layer) for layer in with_sublayers(sublayer)}
        fewer = [layer for layer in layers if id(layer) not in inside]
        if len(fewer) < len(layers):
            error = _error(twin, exact, fewer)
            if error is not None and error <= thresholds.FORWARD_ERROR:
                layers = fewer
    return layers


def _error(twin, exact, layers):
    try:
        return relative_error(twin.forward("float32", layers), exact)
    # Adding float32 to the float16 of a part, TensorFlow and torch raise.
    except Exception:
        return None
