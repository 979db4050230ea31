"""Outputs clamped to a format's maximum, where what follows ignores the rest.

A gate of 1e5 is as open as one of 65504, and a score of 1e5 wins a softmax as
one of 65504 does, but infinite ones make NaN. Such outputs of an operation are
clamped by `keras.ops.clip` behind it, an operation of the graph that Keras
saves and loads. It is for inference only: where it acts its gradient is zero.
"""

import itertools
from typing import Any

import keras
import numpy as np

from keras_mixprec.formats import get_format
from keras_mixprec.inference.graph_values import each_value, outputs_of
from keras_mixprec.keras_internals import calls_in, functional_of

# Each clones the graph and runs all batches. A residual stream may leave the
# format in two hundred operations, none of them harmless, as a rule.
_TRIES = 32


def clamp_outputs(
    model: keras.Model, batches: list[Any], dtype: str = "float16"
) -> tuple[keras.Model, list]:
    """Returns a model whose outputs do not change, with clamped operations.

    Those that return more than the format has, of which that does not matter:
    in float32 the outputs are those of before but for half an ulp of the
    format.

    Args:
        model: A built functional or `Sequential` `keras.Model` in float32. Its
            layers are used again.
        batches: List of batches of inputs.
        dtype: String. The format. Defaults to `"float16"`.

    Returns:
        Pair of a functional model and the list of its operations that are
        clamped, layers or others; the model itself if it is empty.
    """
    functional: Any = functional_of(model)
    limit = get_format(dtype).maximum
    beyond = _beyond(functional, batches, limit)
    unseen = get_format(dtype).epsilon / 2
    known = [outputs_of(functional, x) for x in batches]

    def agrees(operations):
        other = _clamped(functional, operations, limit)
        return all(
            np.abs(a - b).max(initial=0.0) <= unseen * np.abs(b).max(initial=0)
            for x, exact in zip(batches, known, strict=True)
            for a, b in zip(outputs_of(other, x), exact, strict=True)
        )

    harmless = _harmless(beyond, agrees)
    if not harmless or not agrees(harmless):
        return model, []
    return _clamped(functional, harmless, limit), harmless


def _harmless(operations, agrees):
    """Those of which `agrees` is true together, found by halves."""
    tries = itertools.count()

    def among(chosen):
        if not chosen or next(tries) >= _TRIES:
            return []
        if agrees(chosen):
            return chosen
        half = len(chosen) // 2
        return among(chosen[:half]) + among(chosen[half:]) if half else []

    return among(operations)


def _beyond(functional, batches, limit):
    """The operations that return a larger number than the limit."""
    returned = [
        (operation, tensor)
        for operation in functional.operations
        for node in calls_in(functional, operation)
        for tensor in node.output_tensors
        if "float" in tensor.dtype and node.input_tensors
    ]
    operations, tensors = zip(*returned, strict=True) if returned else ((), ())
    found: dict[int, Any] = {}
    for x in batches:
        values = each_value(functional, list(tensors), x)
        for operation, value in zip(operations, values, strict=True):
            if np.abs(value).max(initial=0.0) > limit:
                found[id(operation)] = operation
    return list(found.values())


def _clamped(functional, operations, limit):
    chosen = {id(operation) for operation in operations}

    def call(operation, *args, **kwargs):
        outputs = operation(*args, **kwargs)
        if id(operation) not in chosen:
            return outputs
        return keras.tree.map_structure(
            lambda x: keras.ops.clip(x, -limit, limit), outputs
        )

    return keras.models.clone_model(
        functional, clone_function=lambda layer: layer, call_function=call
    )
