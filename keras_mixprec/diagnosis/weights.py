"""Weights that are lost, or that the cast to 16 bits spoils."""

import keras
import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import Culprit, low_layers
from keras_mixprec.keras_internals import (
    AutocastScope,
    own_non_trainable,
    own_trainable,
    set_value,
)
from keras_mixprec.numerics.arrays import (
    largest_magnitude,
    restoring,
    to_array,
)
from keras_mixprec.numerics.layer_hooks import WHOLE, with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay


def lost_weights(model: keras.Model) -> dict:
    """Returns the evidence of weights that are not finite, empty if all are.

    Args:
        model: A built `keras.Model`.
    """
    lost = [
        v.path
        for v in model.weights
        if "float" in v.dtype and nonfinite([to_array(v.value)])
    ]
    return {"variables": len(lost), "first": lost[0]} if lost else {}


def weight_overflows(model: keras.Model) -> list[Culprit]:
    """Returns the layers that have weights beyond what they compute in.

    They are at fault for every input.

    Args:
        model: A built `keras.Model`.
    """
    found = []
    for entry in low_layers(model):
        numbers = overflowing(entry.layer)
        if numbers:
            # The cell of a recurrent layer runs in the loop of that.
            whole = [e for e in entry.lineage() if isinstance(e.layer, WHOLE)]
            path, layers = entry.path, [entry.layer]
            if whole:
                path, layers = whole[-1].path, with_sublayers(whole[-1].layer)
            fault = "weight_overflow", "forward", numbers
            found.append(Culprit(path, layers, *fault))
    return list({culprit.path: culprit for culprit in found}.values())


def weight_fault(
    replay: LayerReplay, exact: list[np.ndarray], numbers: dict
) -> str | None:
    """Returns the kind of fault if a layer's weights do not fit its dtype.

    Args:
        replay: `LayerReplay` of a call that comes out wrong.
        exact: List of arrays, what it returns in float32.
        numbers: Dict, the evidence; what is found out here is added.
    """
    layer = replay.call.layer
    if found := overflowing(layer):
        numbers |= found
        return "weight_overflow"
    for variable, wide, low in _as_cast(layer):
        gone = (low == 0) & (wide != 0)
        if gone.any():
            with restoring([variable]):
                set_value(variable, _like(variable, np.where(gone, 0, wide)))
                without = replay.forward("float32")
            if relative_error(without, exact) > thresholds.FORWARD_ERROR:
                numbers |= _evidence(variable, wide, gone)
                return "weight_underflow"
    return None


def overflowing(layer: keras.Layer) -> dict:
    """Returns the evidence of a weight that the cast makes infinite, if any.

    But what stands for minus infinity.

    Args:
        layer: A layer that computes in 16 bits.
    """
    for variable, wide, low in _as_cast(layer):
        gone = np.isinf(low) & np.isfinite(wide)
        gone &= wide > thresholds.MINUS_INFINITY
        if gone.any():
            return _evidence(variable, wide, gone)
    return {}


def _evidence(variable, wide, gone):
    return {
        "variable": variable.name,
        "largest_weight": largest_magnitude(wide[gone]),
        "weights": int(gone.sum()),
        "of": int(gone.size),
    }


def _as_cast(layer):
    """Yields the weights of a layer, without and with its cast.

    An embedding casts the rows that it looks up.
    """
    if not layer.autocast and not isinstance(layer, keras.layers.Embedding):
        return
    for variable in [*own_trainable(layer), *own_non_trainable(layer)]:
        if "float" in variable.dtype:
            wide = to_array(variable.value)
            with AutocastScope(layer.compute_dtype):
                low = to_array(variable.value)
            yield variable, wide, low


def _like(variable, array):
    return keras.ops.convert_to_tensor(array, variable.dtype)
