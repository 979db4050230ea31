"""Weights moved by no more than float16 rounds them."""

import contextlib

import numpy as np
from keras import ops


@contextlib.contextmanager
def jittered(model, seed: int):
    """Within the context every weight is off by half a float16 ulp.

    Args:
        model: A built `keras.Model`.
        seed: Int. Which of the many ways.
    """
    random = np.random.default_rng(seed)
    before = [(v, ops.copy(v.value)) for v in model.trainable_variables]
    try:
        for variable, value in before:
            signs = random.choice([-1.0, 1.0], variable.shape)
            factor = ops.cast(1.0 + 2.0**-11 * signs, "float32")
            wide = ops.cast(value, "float32") * factor
            variable.assign(ops.cast(wide, variable.dtype))
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
