"""Weights and inputs as they might have been rounded as well.

If a result depends on this, the 16-bit format does not settle it.
"""

import contextlib

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import flat_layers, own_trainable, set_value
from keras_mixprec.numerics.arrays import is_float, restoring, to_array


def narrowed(dtype: str | None) -> str:
    """Returns the dtype if it is of 16 bits, else float16."""
    return dtype if dtype in SIXTEEN_BITS else "float16"


@contextlib.contextmanager
def jittered(model, seed: int):
    """Within the context every weight is off by half a 16-bit ulp.

    Layers that compute in bfloat16 use its ulp, all others that of float16.

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
            value = off_by_half_ulp(variable.value, narrowed(dtype), random)
            set_value(variable, value)
        yield


def off_by_half_ulp(tensor, dtype: str, random: np.random.Generator):
    """Returns the tensor with each number moved up or down.

    Args:
        tensor: A float tensor.
        dtype: String. The format whose rounding it is.
        random: `np.random.Generator`.
    """
    epsilon = get_format(dtype).epsilon
    signs = random.choice([-1.0, 1.0], tuple(tensor.shape))
    factor = ops.cast(1.0 + epsilon / 2 * signs, "float32")
    wide = ops.cast(tensor, "float32") * factor
    return ops.cast(wide, tensor.dtype)


def widened_off_by_half_ulp(tensor, random: np.random.Generator):
    """Returns a 16-bit tensor in float32, moved by half of its own ulp.

    A wider tensor has not been rounded, and stays the same.

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

    The mean of such inputs may have been made 0, so that only rounding is left
        of it. Whole numbers do not change, because some stand for tokens.

    Args:
        batch: As `train_step` takes it.
        seed: Int. Which of the many ways.
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
