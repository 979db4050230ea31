"""Tensors of any backend as NumPy arrays."""

import numpy as np
from keras import ops
from keras.src import backend


def is_float(tensor) -> bool:
    """Whether a tensor holds floating-point numbers."""
    return "float" in backend.standardize_dtype(tensor.dtype)


def to_array(tensor) -> np.ndarray:
    """Returns a float tensor, 16-bit ones included, as a float64 array."""
    tensor = ops.cast(tensor, "float32")
    return np.asarray(ops.convert_to_numpy(tensor), "float64")
