"""Batch and loss of the step being taken: which rows are not finite."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

PARTS = ("x", "y", "sample_weight")

# Larger than any row number.
_NONE = 2**31 - 1


@dataclasses.dataclass
class _Step:
    batch: list = dataclasses.field(default_factory=list)
    weights: Callable = list
    loss: Any = None


_NO_STEP = _Step()
_STEP = contextvars.ContextVar("step", default=_NO_STEP)


@contextlib.contextmanager
def training_on(batch: list, weights: Callable):
    """Context of a `train_step`: its batch and weights are known within.

    Args:
        batch: List of the batch as `train_step` takes it, empty if it is not
            known.
        weights: Function that returns the variables of the model, or their
            values.
    """
    token = _STEP.set(_Step(batch, weights))
    try:
        yield
    finally:
        _STEP.reset(token)


def loss_is(loss):
    """Makes the loss of the step under way known, before it is applied.

    Args:
        loss: Tensor, outside of any differentiated function of JAX.
    """
    if (step := _STEP.get()) is not _NO_STEP:
        step.loss = loss


def loss():
    """Returns the loss of the step under way, `None` if it is not known."""
    return _STEP.get().loss


def loss_kinds():
    """Returns what the loss is, float32 `(3,)` as `NONFINITE_KINDS`.

    All are 0 if it is finite, or not known.
    """
    return ops.zeros((3,)) if loss() is None else kinds_of(loss())


def kinds_of(tensor):
    """Returns which of `NONFINITE_KINDS` a tensor holds, float32 `(3,)`."""
    infinite = [ops.equal(tensor, sign * np.inf) for sign in (1, -1)]
    kinds = [ops.any(kind) for kind in (*infinite, ops.isnan(tensor))]
    return ops.cast(ops.stack(kinds), "float32")


def known() -> bool:
    """Returns whether the batch of the step under way is known."""
    return bool(_STEP.get().batch)


def lost_weights():
    """Returns whether a weight of the model is not finite, int32 scalar.

    0 if the weights of the step under way are not known.
    """
    finite = [
        ops.all(ops.isfinite(ops.convert_to_tensor(weight)))
        for weight in _STEP.get().weights()
        if "float" in keras.backend.standardize_dtype(weight.dtype)
    ]
    all_finite = ops.all(ops.stack(finite)) if finite else True
    return 1 - ops.cast(all_finite, "int32")


def first_bad_rows():
    """Returns where a step's inputs are not finite.

    Returns:
        int32 tensor `(3,)`: 1 + the first row of x, y and the sample weights
        that is not finite, 0 where all are.
    """
    try:
        parts = keras.utils.unpack_x_y_sample_weight(*_STEP.get().batch)
        return ops.stack([_first_bad_row(part) for part in parts])
    # Sparse and ragged tensors have no rows to look at, and no error here may
    # stop the step.
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
    bad = ops.logical_not(ops.isfinite(leaf))
    rows = bad
    axes = tuple(range(1, len(leaf.shape)))
    if axes:
        rows = ops.any(bad, axis=axes)
    first = ops.cast(ops.argmax(ops.cast(rows, "int32")), "int32")
    return ops.where(ops.any(rows), first, _NONE)
