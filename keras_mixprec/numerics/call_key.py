"""What the operations of a layer's call follow from, so that equals are known.

Most layers of a deep model are like another one: of 106 calls of
`BatchNormalization` in the two traces of a ResNet50, 18 are not.
"""

import inspect
import json

import keras
from keras import ops, tree

from keras_mixprec.keras_internals import (
    flat_layers,
    get_keras_mask,
    training_in_force,
)

_PLAIN = (str, int, float, bool, type(None))


def call_key(layer: keras.layers.Layer, args: tuple, kwargs: dict):
    """Returns a hashable that equal calls have in common, or `None`.

    Of Keras' own layers only, with nothing inside them: what those of the user
    do may follow from anything. Variables are as different inputs are.

    Args:
        layer: The layer.
        args: What it is called with.
        kwargs: What it is called with by name.
    """
    if not _follows_from_config(layer):
        return None
    try:
        config = layer.get_config() | {"name": None}
        given = json.dumps(tree.map_structure(_described, [args, kwargs]))
        return (
            type(layer),
            json.dumps(config, sort_keys=True),
            given,
            json.dumps([(*v.shape, v.dtype) for v in layer.variables]),
            training_in_force(),
            id(getattr(layer, "activation", None)),
        )
    except (TypeError, ValueError, NotImplementedError):
        return None  # An array, or an object of the user's own.


def _follows_from_config(layer):
    kind = type(layer)
    functions = filter(inspect.isfunction, vars(layer).values())
    return (
        kind.__module__.startswith("keras.")
        and kind is not keras.layers.Lambda
        and kind.compute_mask is keras.layers.Layer.compute_mask
        and len(flat_layers(layer)) == 1
        and layer.activity_regularizer is None
        # A state of random numbers is none of the variables that are inputs.
        and all("float" in v.dtype for v in layer.variables)
        and all(f.__module__.startswith("keras.") for f in functions)
    )


def _described(leaf):
    if ops.is_tensor(leaf) and get_keras_mask(leaf) is None:
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return f"{dtype} {tuple(leaf.shape)}"
    if isinstance(leaf, _PLAIN):
        return repr(leaf)
    raise TypeError
