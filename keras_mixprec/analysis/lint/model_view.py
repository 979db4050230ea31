"""The view of a model and its data that lint rules read."""

import functools

import keras
import numpy as np
from keras import tree

from keras_mixprec._checks import check_list
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.policies.graph import output_layers
from keras_mixprec.policies.layers import LayerEntry, walk_with_model
from keras_mixprec.policies.multiply_adds import multiply_adds

# A `train_step` may need a whole batch, so lint runs on all the data if there
# are at most 128 samples or at most 2**20 numbers. From more data, lint takes
# the first 32 rows, and the rows with the largest and the smallest numbers,
# which overflow first.
_BATCH, _NUMBERS, _ROWS = 128, 2**20, 32


class ModelView:
    """The model and the data that rules read.

    Attributes:
        model: The `keras.Model`, with the policies to check.
        x, y: The data given to `lint`: arrays, dicts or tuples of them, or
            `None`.
        inputs, targets: Dicts of the NumPy arrays in `x` and `y` by name, such
            as `"x"` or `"x['ids']"`; empty without data.
        callbacks: List of `keras.callbacks.Callback` for `fit`.
        supposed: Boolean. `True` if the model was compiled under policies other
            than the ones to check.
        entries: List of `LayerEntry`: every layer, the model itself last.
        low: The `entries` that compute in float16 or bfloat16.
        in_float32: The `entries` that compute in float32.
    """

    def __init__(
        self, model: keras.Model, x=None, y=None, callbacks=(), supposed=False
    ):
        self.model = model
        self.supposed = supposed
        kind = keras.callbacks.Callback
        what = "a list of `keras.callbacks.Callback`"
        self.callbacks = check_list("callbacks", callbacks, kind, what)
        self.x = x
        self.y = y
        self.inputs = _named_arrays("x", x)
        self.targets = _named_arrays("y", y)
        _check_lengths(self.inputs | self.targets)
        self.entries = walk_with_model(model)
        self.low = [
            e for e in self.entries if e.layer.compute_dtype in SIXTEEN_BITS
        ]
        self.in_float32 = [
            e for e in self.entries if e.layer.compute_dtype == "float32"
        ]

    def batch(self) -> tuple:
        """Returns some samples: `x`, and `y` if the model has a loss."""
        compiled = getattr(self.model, "compiled", False)
        return _some_rows(self.x, self.y if compiled else None)

    def share(self, entry: LayerEntry) -> float:
        """Returns a layer's share of the known multiply-adds, from 0 to 1."""
        known = self._multiply_adds
        return known[entry.path] / max(sum(known.values()), 1)

    @functools.cached_property
    def output_layers(self) -> set[int]:
        """Ids of the layers that make the model's outputs."""
        return output_layers(self.model)

    @functools.cached_property
    def _multiply_adds(self):
        return {entry.path: multiply_adds(entry) or 0 for entry in self.entries}


def _named_arrays(name, data):
    """Returns the arrays of `x` or `y`, by names such as `x['ids']`."""
    return {
        name + "".join(f"[{key!r}]" for key in path): _to_array(name, leaf)
        for path, leaf in tree.flatten_with_path(data)
        if leaf is not None
    }


def _check_lengths(arrays):
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "`x` and `y` must have the same number of samples. "
            f"Received: {sizes}"
        )


def _to_array(name, data):
    try:
        array = as_numpy(data)
    except Exception:
        array = np.zeros(())
    if not array.ndim or not len(array):
        raise ValueError(
            f"`{name}` must be an array of at least one sample, or a dict "
            "or list of arrays. "
            f"Received: {name}={str(data)[:80]} of type {type(data).__name__}"
        )
    return array


def _some_rows(x, y):
    """Returns the first rows, and the rows with the most extreme numbers."""
    leaves = [as_numpy(leaf) for leaf in tree.flatten(x)]
    count, numbers = len(leaves[0]), sum(leaf.size for leaf in leaves)
    if count <= _BATCH or numbers <= _NUMBERS:
        return x, y
    rows = set(range(_ROWS))
    for array in leaves:
        if array.dtype.kind in "fiu":
            flat = array.reshape(count, -1)
            rows.add(int(np.argmax(flat.max(axis=1))))
            rows.add(int(np.argmin(flat.min(axis=1))))
    index = sorted(rows)
    return tree.map_structure(
        lambda leaf: leaf if leaf is None else as_numpy(leaf)[index], (x, y)
    )
