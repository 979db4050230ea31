"""What the rules of lint read of a model and its data."""

import functools

import keras
import numpy as np

from keras_mixprec.analysis.lint.flow import Flow
from keras_mixprec.diagnosis.batch import build_for, head, to_tensors
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.tracing import trace_model
from keras_mixprec.policies.graph import neighbours, output_layers
from keras_mixprec.policies.layers import LayerEntry, walk_with_model
from keras_mixprec.policies.multiply_adds import multiply_adds


class ModelView:
    """A model as rules see it; each part is computed once, when asked for.

    Attributes:
        model: The `keras.Model`, with the policies that are checked.
        x, y: What `lint` was given: arrays, dicts or tuples of them, or `None`.
        entries: List of `LayerEntry`: every layer, the model itself last.
    """

    def __init__(self, model: keras.Model, x=None, y=None):
        self.model = model
        self.x = x
        self.y = y
        self.entries = walk_with_model(model)

    @functools.cached_property
    def flow(self) -> Flow:
        """The operations inside of all layers, in their dtypes."""
        if not self.model.built and self.x is not None:
            rows = head((self.x, self.y, None))
            build_for(self.model, to_tensors(rows))
        return Flow(trace_model(self.model, self.x, self.y))

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

    @functools.cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """The arrays of `x` by name: `x`, `x[0]` or `x['ids']`."""
        return {} if self.x is None else _named("x", self.x)

    @functools.cached_property
    def targets(self) -> dict[str, np.ndarray]:
        """The arrays of `y` by name."""
        return {} if self.y is None else _named("y", self.y)


def _named(name, data):
    if isinstance(data, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in data.items()]
    elif isinstance(data, (list, tuple)) and any(map(_is_array, data)):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(data)]
    else:
        return {name: keras.ops.convert_to_numpy(data)}
    return {n: a for key, part in parts for n, a in _named(key, part).items()}


def _is_array(data):
    return hasattr(data, "shape") or isinstance(data, (dict, list, tuple))
