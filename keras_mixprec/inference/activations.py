"""The range of what each layer takes and returns, on calibration data."""

import math
from typing import Any

import keras
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.inference.calibration import to_tensors
from keras_mixprec.numerics.arrays import is_float
from keras_mixprec.numerics.layer_hooks import WHOLE, CallHook
from keras_mixprec.policies.layers import LayerEntry
from keras_mixprec.policies.matmul_precision import computed_in


def largest_activations(
    model: keras.Model, entries: list[LayerEntry], batches: list[Any]
) -> dict[str, float]:
    """Returns the largest magnitude that each layer takes or returns.

    Args:
        model: A `keras.Model` in float32.
        entries: List of its `LayerEntry`s.
        batches: List of batches of inputs.

    Returns:
        Dict of layer path to float, infinite where a number is not finite; of
        the cell of a recurrent layer what that takes and returns. A layer that
        was not called, or takes and returns no such numbers, is not in it.
    """
    found: dict[str, float] = {}

    def measure(run, layer, path, index, args, kwargs):
        outputs = run(*args, **kwargs)
        # What a layer does not cast does not count.
        seen = (args, outputs) if layer.autocast else outputs
        for tensor in tree.flatten(seen):
            if is_float(tensor) and active.replay().is_concrete(tensor):
                found[path] = max(found.get(path, 0.0), _largest(tensor))
        return outputs

    with computed_in("float32"):
        for batch in batches:
            # One hook a batch counts the calls of one batch.
            with CallHook(entries, measure).hooked():
                model(to_tensors(batch), training=False)
    # What is inside of it is not called by itself, but in a compiled loop.
    for entry in entries:
        for above in entry.lineage():
            if isinstance(above.layer, WHOLE) and above.path in found:
                found.setdefault(entry.path, found[above.path])
    return found


def _largest(tensor):
    if not math.prod(tensor.shape):
        return 0.0
    largest = float(ops.convert_to_numpy(ops.max(ops.abs(tensor))))
    return largest if math.isfinite(largest) else math.inf
