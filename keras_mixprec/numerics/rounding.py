"""Rounds weights and inputs differently, to measure the noise of rounding.

If a result changes with the rounding, no 16-bit format can determine it.
"""

import contextlib

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import flat_layers, own_trainable, set_value
from keras_mixprec.numerics.arrays import is_float, restoring, to_array


def narrowed(dtype: str | None) -> str:
    """Returns the dtype if it has 16 bits, otherwise float16."""
    return dtype if dtype in SIXTEEN_BITS else "float16"


@contextlib.contextmanager
def jittered(model, seed: int):
    """Context manager in which every weight is off by half a 16-bit ulp.

    The ulp is bfloat16's in layers that compute in bfloat16, and float16's in
    all other layers.

    Args:
        model: A built `keras.Model`.
        seed: Int. The seed for the directions of rounding.
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
            value = off_by_half_ulp(variable.value, narrowed(dtype), random)
            set_value(variable, value)
        yield


def off_by_half_ulp(tensor, dtype: str, random: np.random.Generator):
    """Returns the tensor with each number moved up or down by half an ulp.

    Args:
        tensor: A float tensor.
        dtype: String. The format that defines the ulp.
        random: `np.random.Generator`.
    """
    epsilon = get_format(dtype).epsilon
    signs = random.choice([-1.0, 1.0], tuple(tensor.shape))
    factor = ops.cast(1.0 + epsilon / 2 * signs, "float32")
    wide = ops.cast(tensor, "float32") * factor
    return ops.cast(wide, tensor.dtype)


def widened_off_by_half_ulp(tensor, random: np.random.Generator):
    """Returns a 16-bit tensor in float32, moved by half of its own ulp.

    A wider tensor stays the same, because it was not rounded to 16 bits.

    Args:
        tensor: A float tensor.
        random: `np.random.Generator`.
    """
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if dtype not in SIXTEEN_BITS:
        return tensor
    return off_by_half_ulp(ops.cast(tensor, "float32"), dtype, random)


def rounded_otherwise(batch, seed: int):
    """Returns a batch whose inputs are off by half a float32 ulp.

    For example, the mean of normalized inputs is only rounding noise, and this
    change shows it. Whole numbers stay the same, because they may be tokens.

    Args:
        batch: As `train_step` takes it.
        seed: Int. The seed for the directions of rounding.
    """
    random = np.random.default_rng(seed)

    def moved(leaf):
        if not is_float(leaf):
            return leaf
        try:
            array = to_array(leaf)
        except Exception:  # Some sparse or ragged tensors cannot become arrays.
            return leaf
        if np.array_equal(array, np.rint(array), equal_nan=True):
            return leaf
        return off_by_half_ulp(leaf, "float32", random)

    if not isinstance(batch, (list, tuple)):
        return tree.map_structure(moved, batch)
    x, *others = batch
    return type(batch)([tree.map_structure(moved, x), *others])
