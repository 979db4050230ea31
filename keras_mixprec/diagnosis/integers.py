"""Integers, such as token ids, that a layer is given as floats."""

import ml_dtypes
import numpy as np


def rounded_integers(inputs: list[np.ndarray], dtype: str) -> dict:
    """Returns how many integers the cast of an input to 16 bits changes.

    float16 holds all integers up to 2,048, bfloat16 up to 256.

    Args:
        inputs: List of float32 arrays, what a layer was given.
        dtype: String. What it casts them to.

    Returns:
        `{"rounded_integers": count}`, or an empty dict if none is changed or
        the inputs are no integers.
    """
    kind = getattr(ml_dtypes, dtype, dtype)
    changed = 0
    for array in inputs:
        if array.size and (array == np.rint(array)).all():
            with np.errstate(over="ignore"):
                cast = array.astype(kind).astype("float32")
            changed += int((cast != array).sum())
    return {"rounded_integers": changed} if changed else {}
