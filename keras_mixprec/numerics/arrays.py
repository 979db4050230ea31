"""Tensors of any backend as NumPy arrays, and such arrays in 16 bits."""

import contextlib
import math
from collections.abc import Iterable

import numpy as np
from keras import ops

from keras_mixprec.keras_internals import set_value

# Attributes of sparse and ragged tensors that dense ones lack.
_NOT_DENSE = ("dense_shape", "row_splits", "todense")


def is_float(leaf) -> bool:
    """Returns whether a leaf is a dense tensor of floating-point numbers."""
    # Keras has no dtype name for JAX's random keys, so ask the tensor.
    return (
        ops.is_tensor(leaf)
        and "float" in str(leaf.dtype)
        and not any(hasattr(leaf, name) for name in _NOT_DENSE)
    )


def detached(leaf):
    """Returns a tensor without its history, which torch would go back into."""
    attached = getattr(leaf, "requires_grad", False)
    return ops.stop_gradient(leaf) if attached else leaf


def largest_magnitude(array: np.ndarray) -> float:
    """Returns the largest finite magnitude, or 0."""
    largest = _largest(array)
    if not math.isfinite(largest):
        largest = _largest(array[np.isfinite(array)])
    return largest


def count_nonfinite(array: np.ndarray) -> int:
    """Returns the number of elements that are infinite or NaN."""
    # A sum is finite only if all of it is, and needs no array of booleans.
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum()):
            return 0
    return int((~np.isfinite(array)).sum())


def as_numpy(leaf) -> np.ndarray:
    """Returns any array or tensor as a NumPy array.

    A tensor of torch's may be that on any backend, need gradients, be on a
    device, or have a dtype that NumPy lacks.

    Args:
        leaf: An array, a tensor of any library, or what has `__array__`.
    """
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        if "bfloat16" in str(leaf.dtype) or "float8" in str(leaf.dtype):
            leaf = leaf.float()
    return np.asarray(leaf)


def to_array(tensor) -> np.ndarray:
    """Returns a float tensor, 16-bit ones included, as a float32 array."""
    # TensorFlow hands out a single bfloat16 as a number, which is not an array.
    if getattr(tensor, "shape", None) == () and "bfloat16" in str(tensor.dtype):
        tensor = ops.cast(tensor, "float32")
    # Cast no other tensor here: JAX would compile a program for every shape.
    return np.asarray(ops.convert_to_numpy(tensor), "float32")


def to_arrays(tensors: Iterable) -> list[np.ndarray]:
    """Returns the arrays of some float tensors, as `to_array` does."""
    return [to_array(tensor) for tensor in tensors]


def _largest(array):
    # NaN if there is one. `abs` would copy the array.
    highest, lowest = array.max(initial=0.0), array.min(initial=0.0)
    return float(np.maximum(highest, -lowest))


@contextlib.contextmanager
def restoring(variables):
    """Context after which variables have the values that they had before."""
    before = [(variable, ops.copy(variable.value)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            set_value(variable, value)
