"""What the rules of lint read of a model and its data."""

import functools

import keras
import numpy as np

from keras_mixprec.analysis.lint.dry_run import DryRun
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.policies.graph import (
    fed_by_inputs,
    neighbours,
    output_layers,
)
from keras_mixprec.policies.layers import LayerEntry, walk_with_model
from keras_mixprec.policies.matmul_precision import MatmulPrecision, in_force
from keras_mixprec.policies.multiply_adds import multiply_adds


class ModelView:
    """A model as rules see it; each part is computed once, when asked for.

    Attributes:
        model: The `keras.Model`, with the policies that are checked.
        x, y: What `lint` was given: arrays, dicts or tuples of them, or `None`.
        inputs, targets: Dicts of the NumPy arrays in them by name, such as
            `"x"` or `"x['ids']"`; empty without.
        callbacks: List of `keras.callbacks.Callback`, those of `fit`.
        supposed: Boolean. Whether the policies are another one than the model
            was compiled under.
        entries: List of `LayerEntry`: every layer, the model itself last.
    """

    def __init__(
        self, model: keras.Model, x=None, y=None, callbacks=(), supposed=False
    ):
        self.model = model
        self.supposed = supposed
        self.callbacks = _check_callbacks(callbacks)
        self.x = x
        self.y = y
        self.inputs = named_arrays("x", x)
        self.targets = named_arrays("y", y)
        _check_lengths(self.inputs | self.targets)
        self.entries = walk_with_model(model)

    @functools.cached_property
    def dry_run(self) -> DryRun | None:
        """What runs the samples, `None` without; the model is built then."""
        if self.x is None:
            return None
        return DryRun(self.model, self.x, self.y)

    @functools.cached_property
    def matmul_precision(self) -> MatmulPrecision:
        """What float32 products are computed in on the default devices."""
        return in_force()

    @functools.cached_property
    def low(self) -> list[LayerEntry]:
        """The layers that compute in float16 or bfloat16."""
        return [
            entry
            for entry in self.entries
            if entry.layer.compute_dtype in SIXTEEN_BITS
        ]

    @functools.cached_property
    def multiply_adds(self) -> dict[str, int | None]:
        """Multiply-adds of one sample by layer path, `None` if unknown."""
        return {entry.path: multiply_adds(entry) for entry in self.entries}

    def share(self, entry: LayerEntry) -> float:
        """Returns a layer's share of the known multiply-adds, from 0 to 1."""
        total = sum(filter(None, self.multiply_adds.values()))
        return (self.multiply_adds[entry.path] or 0) / total if total else 0.0

    @functools.cached_property
    def output_layers(self) -> set[int]:
        """Ids of the layers that make the model's outputs."""
        return output_layers(self.model)

    @functools.cached_property
    def neighbours(self) -> dict[int, tuple[list, list]]:
        """By layer id what feeds it and what it feeds; empty without graph."""
        return neighbours(self.model)

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer that the model was compiled with."""
        return getattr(self.model, "optimizer", None)

    @property
    def first_layers(self) -> list[LayerEntry]:
        """Those that an input of a graph feeds; without graph the model."""
        fed = fed_by_inputs(self.model)
        return [
            entry
            for entry in self.entries
            if id(entry.layer) in (fed or {id(self.model)})
        ]


def named_arrays(name: str, data) -> dict[str, np.ndarray]:
    """Returns the arrays of `x` or `y`, by names such as `x['ids']`.

    Args:
        name: String. The argument's name.
        data: An array, or a dict or list of arrays, or `None`.

    Raises:
        ValueError: If it is none of these, or holds no sample.
    """
    if data is None:
        return {}
    if isinstance(data, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in data.items()]
    elif isinstance(data, (list, tuple)) and any(map(_holds_arrays, data)):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(data)]
    else:
        return {name: _to_array(name, data)}
    return {
        leaf: array
        for key, part in parts
        for leaf, array in named_arrays(key, part).items()
    }


def _check_callbacks(callbacks):
    kind = keras.callbacks.Callback
    known = isinstance(callbacks, (list, tuple))
    if not known or not all(isinstance(c, kind) for c in callbacks):
        raise TypeError(
            "`callbacks` must be a list of `keras.callbacks.Callback`. "
            f"Received: callbacks={callbacks!r}"
        )
    return list(callbacks)


def _check_lengths(arrays):
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "`x` and `y` must have the same number of samples. "
            f"Received: {sizes}"
        )


def _holds_arrays(data):
    return hasattr(data, "shape") or isinstance(data, (dict, list, tuple))


def _to_array(name, data):
    # Keras would copy one of NumPy.
    known = isinstance(data, np.ndarray)
    try:
        array = data if known else as_numpy(data)
    except Exception:
        array = np.zeros(())
    if not array.ndim or not len(array):
        raise ValueError(
            f"`{name}` must be an array of at least one sample, or a dict or "
            "list of arrays as `fit` takes them. "
            f"Received: {name}={str(data)[:80]} of type {type(data).__name__}"
        )
    return array
