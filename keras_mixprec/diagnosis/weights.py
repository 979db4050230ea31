"""Weights that are lost, or that the cast to 16 bits spoils."""

import keras

from keras_mixprec.diagnosis.compare import nonfinite
from keras_mixprec.numerics.arrays import to_array


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
