"""The layers that a search blames, and those that compute in 16 bits."""

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
        path: String. Its path.
        layers: List of the layers to demote: it alone, or some inside it too;
            for a model's own code those that it follows.
        kind: String. As in `Verdict`.
        direction: String. `"forward"` or `"backward"`.
        numbers: Dict. The evidence.
    """

    path: str
    layers: list
    kind: str
    direction: str
    numbers: dict

    def located(self, model) -> "Culprit":
        """Returns itself, with the layers after which a model's code is wrong.

        A model's own code computes in the dtype of what its layers return, so
        that these are demoted for it. `numbers["after"]` are their paths.

        Args:
            model: The `keras.Model`.
        """
        entries = walk_with_model(model)
        if any(e.layer in self.layers for e in entries if e.path == self.path):
            return self
        inside = {id(layer) for layer in self.layers}
        after = [e.path for e in entries if id(e.layer) in inside]
        if not after:
            return self
        return self._replace(numbers=self.numbers | {"after": after})


def computes_low(layer) -> bool:
    """Whether a layer itself computes something in a 16-bit float."""
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
    """Returns how many integers the cast of an input to 16 bits changes.

    float16 holds all integers up to 2,048, bfloat16 up to 256.

    Args:
        inputs: List of float32 arrays, what a layer was given.
        dtype: String. What it casts them to.

    Returns:
        `{"rounded_integers": count}`, or an empty dict if none is changed or
        the inputs are no integers.
    """
    kind = getattr(ml_dtypes, dtype, dtype)
    changed = 0
    for array in inputs:
        if array.size and (array == np.rint(array)).all():
            with np.errstate(over="ignore"):
                cast = array.astype(kind).astype("float32")
            changed += int((cast != array).sum())
    return {"rounded_integers": changed} if changed else {}
