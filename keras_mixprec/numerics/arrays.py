"""Tensors of any backend as NumPy arrays."""

import math

import numpy as np
from keras import ops


def is_float(leaf) -> bool:
    """Whether a leaf of a structure is a tensor of floating-point numbers."""
    # Not by Keras' name for the dtype: JAX' random keys have none.
    return ops.is_tensor(leaf) and "float" in str(leaf.dtype)


def largest_magnitude(array: np.ndarray) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
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


def to_array(tensor) -> np.ndarray:
    """Returns a float tensor, 16-bit ones included, as a float32 array."""
    # Not cast before: JAX compiles a program for every shape.
    return np.asarray(ops.convert_to_numpy(tensor), "float32")


def _largest(array):
    # NaN if there is one. `abs` would copy the array.
    highest, lowest = array.max(initial=0.0), array.min(initial=0.0)
    return float(np.maximum(highest, -lowest))
