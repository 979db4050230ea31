"""Tensors of any backend as NumPy arrays."""

import numpy as np
from keras import ops
from keras.src import backend


def is_float(leaf) -> bool:
    """Whether a leaf of a structure is a tensor of floating-point numbers."""
    return ops.is_tensor(leaf) and "float" in backend.standardize_dtype(
        leaf.dtype
    )


def largest_magnitude(array: np.ndarray) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def to_array(tensor) -> np.ndarray:
    """Returns a float tensor, 16-bit ones included, as a float64 array."""
    tensor = ops.cast(tensor, "float32")
    return np.asarray(ops.convert_to_numpy(tensor), "float64")
