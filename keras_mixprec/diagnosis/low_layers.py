"""Which layers compute in 16 bits themselves."""

import keras

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.policies.names import is_fixed

_CONTAINERS = tuple(
    cls.call for cls in (keras.Sequential, keras.src.models.Functional)
)


def computes_low(layer) -> bool:
    """Whether a layer itself computes something in a 16-bit float."""
    return (
        layer.compute_dtype in SIXTEEN_BITS
        and not is_fixed(layer)
        and type(layer).call not in _CONTAINERS
    )


def low_layers(model) -> list:
    """Returns the entries of a model that compute in 16 bits."""
    return [e for e in walk_with_model(model) if computes_low(e.layer)]
