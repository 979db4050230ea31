"""Which layer of a converted model rounds the most."""

import math
from typing import Any

import keras
from keras import tree

from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.inference.storage import Assignment
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.layer_hooks import (
    CallHook,
    in_float32,
    temporary_policies,
)
from keras_mixprec.policies.layers import LayerEntry


def least_exact(
    model: keras.Model,
    entries: list[LayerEntry],
    assignment: Assignment,
    x: Any,
) -> tuple[str, float]:
    """Returns the layer with the largest error of its own, and that.

    Each is compared with itself in float32 on what it is given.

    Args:
        model: A `keras.Model` in float32.
        entries: Its `LayerEntry`s.
        assignment: `Assignment`, the dtypes to compute in.
        x: One batch of inputs, as tensors.

    Returns:
        Pair of path and relative error, infinite if its outputs are not
        finite; `("", 0.0)` if all compute in float32.
    """
    worst = ("", 0.0)
    layers = {entry.path: entry.layer for entry in entries}

    def compare(run, layer, path, index, args, kwargs):
        nonlocal worst
        outputs = run(*args, **kwargs)
        if not assignment.is_narrow(path):
            return outputs
        with in_float32(layers[path]):
            exact = _floats(run(*args, **kwargs))
        low = _floats(outputs)
        error = math.inf if nonfinite(low) else relative_error(low, exact)
        # An enclosing layer comes after what is inside it, and blames it.
        if error > worst[1]:
            worst = path, error
        return outputs

    with (
        temporary_policies(assignment.computing(entries)),
        CallHook(entries, compare).hooked(),
        keras.StatelessScope(),
    ):
        model(x, training=False)
    return worst


def _floats(outputs):
    return [to_array(x) for x in filter(is_float, tree.flatten(outputs))]
