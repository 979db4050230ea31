"""Dry steps."""

import keras
import numpy as np
from keras import layers, ops

from keras_mixprec.numerics.dry_step import dry_step


def compiled(*parts, shape=(2,), optimizer="adam", jit=False, dtype=None):
    """A built Sequential, its optimizer as well."""
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *parts])
    model.compile(optimizer, "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)
    return model


def tensors(*arrays):
    return tuple(ops.convert_to_tensor(a, "float32") for a in arrays)


def test_a_dry_step_leaves_no_gradients_behind():
    model = compiled(layers.Dense(1))
    model.steps_taken = keras.Variable(0, dtype="int32", trainable=False)
    (x,) = tensors(np.ones((4, 2)))
    step = dry_step(model, (x, x[:, :1]), 2.0)
    assert len(step.gradients) == 2
    for variable in model.trainable_variables:
        assert getattr(variable.value, "grad", None) is None
