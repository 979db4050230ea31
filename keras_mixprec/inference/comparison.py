"""Compares a converted model with float32: outputs, ranges, speed."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.devices.timing import compare
from keras_mixprec.diagnosis.criterion import largest, relative_error
from keras_mixprec.numerics.arrays import count_nonfinite, is_float, to_array
from keras_mixprec.numerics.layer_hooks import WHOLE, CallHook
from keras_mixprec.policies.layers import LayerEntry
from keras_mixprec.policies.matmul_precision import computed_in

# The total time for which two models run in turns, in seconds.
_SECONDS = 1.5


def to_tensors(batch: Any) -> Any:
    """Returns a batch as tensors."""
    return tree.map_structure(ops.convert_to_tensor, batch)


def float_outputs(outputs: Any) -> list[np.ndarray]:
    """Returns the floating-point arrays in the result of `predict`."""
    found = [a for a in tree.flatten(outputs) if "float" in str(a.dtype)]
    return [a.astype("float32") for a in found]


def drift(
    names: list[str], exact: list[list], low: list[list]
) -> list[dict[str, Any]]:
    """Returns the differences between a converted model and float32.

    Args:
        names: List of strings, the names of the outputs.
        exact: List of the float32 outputs of each batch.
        low: List of the converted model's outputs of each batch.

    Returns:
        List of a dict for each output: `output`, its name; `relative`, the norm
        of the difference as a share of the norm in float32; `largest` and
        `mean` of the absolute differences; `scale`, the largest magnitude in
        float32; `nonfinite`, the count of numbers that are finite only in
        float32; `top1_agreement`, the share of samples with the same top class,
        `None` if outputs do not look like class scores.

    Example:
    >>> exact = np.ones((2, 3)), np.zeros((1, 3))
    >>> [found] = drift(["y"], [exact[:1]], [[exact[0] + 0.5]])
    >>> found["relative"], found["largest"], found["top1_agreement"]
    (0.5, 0.5, 1.0)
    """
    outputs = [*zip(*exact, strict=True)], [*zip(*low, strict=True)]
    if len(names) != len(outputs[0]):
        names = [f"output_{n}" for n in range(len(outputs[0]))]
        names = names if len(names) > 1 else ["output"]
    return [
        {"output": name} | _drift(wide, narrow)
        for name, wide, narrow in zip(names, *outputs, strict=True)
    ]


def largest_drift(found: list[dict[str, Any]]) -> float:
    """Returns the largest relative error in the result of `drift`."""
    return max((row["relative"] for row in found), default=0.0)


def _drift(exact, low):
    with np.errstate(all="ignore"):
        off = [(a - b).ravel() for a, b in zip(exact, low, strict=True)]
    off = np.abs(np.concatenate(off))
    off = off[np.isfinite(off)]
    pairs = [*zip(exact, low, strict=True)]
    return {
        "relative": relative_error(low, exact),
        "largest": largest([off]),
        "mean": float(off.mean()) if off.size else 0.0,
        "scale": largest(exact),
        "nonfinite": sum(count_nonfinite(b[np.isfinite(a)]) for a, b in pairs),
        "top1_agreement": _agreement(pairs) if _are_scores(exact[0]) else None,
    }


def _are_scores(array):
    """Returns whether an output looks like class scores.

    The scores may be of a sample, or of each position in a sample.
    """
    if array.ndim not in (2, 3):
        return False
    return array.shape[-1] > 1 or bool(((array >= 0) & (array <= 1)).all())


def _agreement(pairs):
    same = [(_classes(a) == _classes(b)).ravel() for a, b in pairs]
    return float(np.concatenate(same).mean())


def _classes(array):
    return array.argmax(-1) if array.shape[-1] > 1 else array[..., 0] > 0.5


def latency(
    reference: keras.Model, converted: keras.Model, x: Any
) -> dict[str, Any]:
    """Times `predict_on_batch` of two models in turns.

    Args:
        reference: The model in float32.
        converted: The converted model.
        x: One batch of inputs.

    Returns:
        Dict: `before`, the seconds of a batch in float32; `speedup`, the median
        ratio of the pairs; `after`, `before` divided by `speedup`; and `pairs`,
        the number of pairs.
    """
    found = compare(
        {
            "before": lambda: reference.predict_on_batch(x),
            "after": lambda: converted.predict_on_batch(x),
        },
        _SECONDS,
    )
    speedup = found.ratios["after"]
    return {
        "before": found.seconds,
        "after": found.seconds / speedup,
        "speedup": speedup,
        "pairs": found.rounds,
    }


def largest_activations(
    model: keras.Model, entries: list[LayerEntry], batches: list[Any]
) -> dict[str, float]:
    """Returns the largest magnitude that each layer takes or returns.

    Args:
        model: A `keras.Model` in float32.
        entries: List of its `LayerEntry`s.
        batches: List of batches of inputs.

    Returns:
        Dict of layer path to float, infinite if a number is not finite. The
        cell of a recurrent layer has the value of that layer. Layers that were
        not called, or have no floating-point tensors, are left out.
    """
    found: dict[str, float] = {}

    def measure(run, layer, path, index, args, kwargs):
        outputs = run(*args, **kwargs)
        # If a layer does not cast its inputs, they cannot overflow in a cast,
        # so only the layer's outputs count.
        seen = (args, outputs) if layer.autocast else outputs
        for tensor in filter(is_float, tree.flatten(seen)):
            if active.replay().is_concrete(tensor):
                array = to_array(tensor)
                own = math.inf if count_nonfinite(array) else largest([array])
                found[path] = max(found.get(path, 0.0), own)
        return outputs

    with computed_in("float32"):
        for batch in batches:
            # A hook counts the calls in one batch, so each batch needs a new
            # hook.
            with CallHook(entries, measure).hooked():
                model(to_tensors(batch), training=False)
    # A recurrent layer's cell runs in a compiled loop, which no hook sees. So
    # the cell gets the value of its layer.
    for entry in entries:
        for above in entry.lineage():
            if isinstance(above.layer, WHOLE) and above.path in found:
                found.setdefault(entry.path, found[above.path])
    return found
