"""Tensors of any backend as NumPy arrays, and such arrays in 16 bits."""

import contextlib
import math

import keras
import numpy as np
from keras import ops

from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import flat_layers, own_trainable, set_value


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


@contextlib.contextmanager
def jittered(model, seed: int):
    """Within the context every weight is off by half a 16-bit ulp.

    Of bfloat16 in the layers that compute in it, else of float16.

    Args:
        model: A built `keras.Model`.
        seed: Int. Which of the many ways.
    """
    random = np.random.default_rng(seed)
    owned = [
        (variable, layer.compute_dtype)
        for layer in flat_layers(model)
        for variable in own_trainable(layer)
        if "float" in variable.dtype
    ]
    weights, dtypes = zip(*owned, strict=True) if owned else ((), ())
    with restoring(weights):
        for variable, dtype in zip(weights, dtypes, strict=True):
            set_value(variable, off_by_half_ulp(variable.value, dtype, random))
        yield


def off_by_half_ulp(tensor, dtype: str | None, random: np.random.Generator):
    """Returns the tensor with each number moved up or down.

    Args:
        tensor: A float tensor.
        dtype: String. The format whose rounding it is; one that is not of 16
            bits stands for float16.
        random: `np.random.Generator`.
    """
    epsilon = get_format(dtype if dtype in SIXTEEN_BITS else "float16").epsilon
    signs = random.choice([-1.0, 1.0], tuple(tensor.shape))
    factor = ops.cast(1.0 + epsilon / 2 * signs, "float32")
    wide = ops.cast(tensor, "float32") * factor
    return ops.cast(wide, tensor.dtype)


def widened_off_by_half_ulp(tensor, random: np.random.Generator):
    """Returns a 16-bit tensor in float32, moved by half of its own ulp.

    One that is not of 16 bits has not been rounded, and is left as it is.

    Args:
        tensor: A float tensor.
        random: `np.random.Generator`.
    """
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if dtype not in SIXTEEN_BITS:
        return tensor
    return off_by_half_ulp(ops.cast(tensor, "float32"), dtype, random)
