"""Tensors of any backend as NumPy arrays, and such arrays in 16 bits."""

import contextlib
import math

import numpy as np
from keras import ops

from keras_mixprec.keras_internals import set_value


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
    # TensorFlow hands out a single bfloat16 as a number, which is no array.
    if getattr(tensor, "shape", None) == () and "bfloat16" in str(tensor.dtype):
        tensor = ops.cast(tensor, "float32")
    # Others are not cast: JAX compiles a program for every shape.
    return np.asarray(ops.convert_to_numpy(tensor), "float32")


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
