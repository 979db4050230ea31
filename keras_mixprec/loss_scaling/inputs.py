"""Finds the non-finite inputs and weights of a step."""

import keras
import numpy as np
from keras import ops, tree

PARTS = ("x", "y", "sample_weight")

# The row number for an input array without non-finite rows. It exceeds every
# real row number, so the minimum over several arrays ignores such an array.
_NONE = 2**31 - 1


def kinds_of(tensor):
    """Returns which `NONFINITE_KINDS` a tensor contains, as float32 `(3,)`."""
    infinite = [ops.equal(tensor, sign * np.inf) for sign in (1, -1)]
    kinds = [ops.any(kind) for kind in (*infinite, ops.isnan(tensor))]
    return ops.cast(ops.stack(kinds), "float32")


def has_bad(variables: list):
    """Returns 1 if any variable contains a non-finite number, else 0."""
    finite = [
        ops.all(ops.isfinite(ops.convert_to_tensor(variable)))
        for variable in variables
        if "float" in variable.dtype
    ]
    all_finite = ops.all(ops.stack(finite)) if finite else True
    return 1 - ops.cast(all_finite, "int32")


def first_bad_rows(batch):
    """Returns the first non-finite row in each part of a batch.

    Args:
        batch: The batch that `train_step` gets.

    Returns:
        int32 tensor `(3,)` for x, y and the sample weights. Each number is 1 +
        the index of the first non-finite row, or 0 if the part is finite.
    """
    try:
        parts = keras.utils.unpack_x_y_sample_weight(batch)
        return ops.stack([_first_bad_row(part) for part in parts])
    # The search for non-finite rows fails on sparse and ragged tensors, but it
    # must never stop a train step.
    except Exception:
        return ops.zeros((len(PARTS),), "int32")


def _first_bad_row(part):
    rows = [_bad_row(leaf) for leaf in tree.flatten(part) if _has_rows(leaf)]
    if not rows:
        return ops.zeros((), "int32")
    first = ops.min(ops.stack(rows))
    return ops.where(ops.equal(first, _NONE), 0, first + 1)


def _has_rows(leaf):
    if not ops.is_tensor(leaf) or not len(leaf.shape):
        return False
    return "float" in keras.backend.standardize_dtype(leaf.dtype)


def _bad_row(leaf):
    axes = tuple(range(1, len(leaf.shape)))
    bad = ops.any(ops.logical_not(ops.isfinite(leaf)), axis=axes)
    first = ops.cast(ops.argmax(ops.cast(bad, "int32")), "int32")
    return ops.where(ops.any(bad), first, _NONE)
