"""A layer at fault, and the list of layers that compute in 16 bits."""

from typing import NamedTuple

import keras
import ml_dtypes
import numpy as np

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import only_runs_graph
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.policies.names import is_fixed


class Culprit(NamedTuple):
    """A layer at fault.

    Attributes:
        path: String. The layer's path, or `None` for no layer of the model.
        layers: List of the layers to demote: the layer itself, and perhaps
            layers inside it. For a model's own code, the layers before that
            code.
        kind: String. As in `Verdict`.
        direction: String. `"forward"`, `"backward"`, or `None` for neither.
        numbers: Dict. The evidence.
    """

    path: str | None
    layers: list
    kind: str
    direction: str | None
    numbers: dict

    def by_layer(self, model) -> list["Culprit"]:
        """Returns one `Culprit` for each layer to demote.

        If this culprit's own layer must be demoted, the list holds only this
        culprit. A model's own code computes in the dtype that its layers
        return, so these layers must be demoted. Then `numbers["in_call_of"]` is
        the model's path.

        Args:
            model: The `keras.Model`.
        """
        entries = walk_with_model(model)
        if any(e.layer in self.layers for e in entries if e.path == self.path):
            return [self]
        inside = {id(layer) for layer in self.layers}
        numbers = self.numbers
        outer = next((e.layer for e in entries if e.path == self.path), None)
        if isinstance(outer, keras.Model):
            numbers = numbers | {"in_call_of": self.path}
        return [
            self._replace(path=e.path, layers=[e.layer], numbers=numbers)
            for e in entries
            if id(e.layer) in inside
        ] or [self]


def layers_of(culprits: list[Culprit]) -> list:
    """Returns all layers to demote for some culprits.

    Args:
        culprits: List of `Culprit`.
    """
    return [layer for culprit in culprits for layer in culprit.layers]


def computes_low(layer) -> bool:
    """Returns whether a layer itself computes something in a 16-bit float."""
    return (
        layer.compute_dtype in SIXTEEN_BITS
        and not is_fixed(layer)
        and type(layer).call is not keras.Sequential.call
        and not only_runs_graph(layer)
    )


def low_layers(model) -> list:
    """Returns the entries of a model that compute in 16 bits."""
    return [e for e in walk_with_model(model) if computes_low(e.layer)]


def rounded_integers(inputs: list[np.ndarray], dtype: str) -> dict:
    """Returns the number of integers that a cast to 16 bits changes.

    float16 holds all integers up to 2,048, bfloat16 up to 256.

    Args:
        inputs: List of float32 arrays, the inputs of a layer.
        dtype: String. The dtype of the cast.

    Returns:
        `{"rounded_integers": count}`, or an empty dict if the cast changes no
        integer, or no input holds only integers.
    """
    kind = getattr(ml_dtypes, dtype, dtype)
    changed = 0
    for array in inputs:
        if array.size and (array == np.rint(array)).all():
            with np.errstate(over="ignore"):
                cast = array.astype(kind).astype("float32")
            changed += int((cast != array).sum())
    return {"rounded_integers": changed} if changed else {}
