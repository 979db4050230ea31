"""Outputs in float32 of a model whose last layers compute in 16 bits."""

import keras
from keras import tree

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import Functional


def with_float32_outputs(model: keras.Model) -> keras.Model:
    """Returns a model that casts its 16-bit outputs to float32.

    By a layer more behind each of them, which is Keras' own.

    Args:
        model: A `keras.Model` that is functional or `Sequential`, and may be
            changed. One of another class is returned as it is.
    """
    if type(model) is keras.Sequential:
        if model.outputs and _is_narrow(model.outputs[0]):
            model.add(_cast(model.layers[-1].name, model.layers))
        return model
    if type(model) is not Functional or not any(map(_is_narrow, model.outputs)):
        return model
    names = iter(model.output_names)

    def cast(tensor):
        name = next(names)
        return (
            _cast(name, model.layers)(tensor) if _is_narrow(tensor) else tensor
        )

    outputs = tree.map_structure(cast, model.output)
    return keras.Model(model.input, outputs, name=model.name)


def _is_narrow(tensor):
    return keras.backend.standardize_dtype(tensor.dtype) in SIXTEEN_BITS


def _cast(name, layers):
    """A layer that does nothing but what its policy says."""
    taken = {layer.name for layer in layers}
    name = f"{name}_float32"
    while name in taken:
        name += "_"
    return keras.layers.Identity(dtype="float32", name=name)
