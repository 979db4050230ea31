"""Converts tensors of any backend to NumPy arrays."""

import contextlib
import math
from collections.abc import Iterable

import numpy as np
from keras import ops

from keras_mixprec.keras_internals import set_value

# Attributes of sparse and ragged tensors that dense ones lack.
_NOT_DENSE = ("dense_shape", "row_splits", "todense")


def is_float(leaf) -> bool:
    """Returns whether a leaf is a dense floating-point tensor."""
    # Ask the tensor, because Keras has no dtype name for JAX's random keys.
    return (
        ops.is_tensor(leaf)
        and "float" in str(leaf.dtype)
        and not any(hasattr(leaf, name) for name in _NOT_DENSE)
    )


def detached(leaf):
    """Returns a tensor without its gradient history, which torch keeps."""
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
    # Try the sum first. A finite sum shows that all elements are finite, and
    # needs no array of booleans.
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum()):
            return 0
    return int((~np.isfinite(array)).sum())


def as_numpy(leaf) -> np.ndarray:
    """Returns any array or tensor as a NumPy array.

    Torch tensors occur with every backend, as in a `DataLoader`. They may need
    gradients, be on a device, or have a dtype that NumPy lacks.

    Args:
        leaf: An array, a tensor of any library, or an object with `__array__`.
    """
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        if "bfloat16" in str(leaf.dtype) or "float8" in str(leaf.dtype):
            leaf = leaf.float()
    return np.asarray(leaf)


def to_array(tensor) -> np.ndarray:
    """Returns a float tensor of any width as a float32 array."""
    # TensorFlow converts a bfloat16 scalar to a number instead of an array, so
    # cast such a scalar first.
    if getattr(tensor, "shape", None) == () and "bfloat16" in str(tensor.dtype):
        tensor = ops.cast(tensor, "float32")
    # Let NumPy cast other tensors. JAX would compile a cast for every shape.
    return np.asarray(ops.convert_to_numpy(tensor), "float32")


def to_arrays(tensors: Iterable) -> list[np.ndarray]:
    """Returns float tensors as float32 arrays."""
    return [to_array(tensor) for tensor in tensors]


def _largest(array):
    # Return NaN if the array has a NaN. Avoid `abs`, which copies the array.
    highest, lowest = array.max(initial=0.0), array.min(initial=0.0)
    return float(np.maximum(highest, -lowest))


@contextlib.contextmanager
def restoring(variables):
    """Context manager that restores the values of variables on exit."""
    before = [(variable, ops.copy(variable.value)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            set_value(variable, value)
