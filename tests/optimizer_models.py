"""Optimizers stepped by hand: op by op, in a compiled graph, under XLA."""

import keras
import numpy as np
import pytest
from keras import ops

BACKEND = keras.backend.backend()
MODES = {
    "tensorflow": ("eager", "graph", "xla"),
    "jax": ("eager", "jit"),
    "torch": ("eager",),
}[BACKEND]
COMPILED = [mode for mode in MODES if mode != "eager"]

each_mode = pytest.mark.parametrize("mode", MODES)
only_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="a feature of TensorFlow"
)
only_jax = pytest.mark.skipif(BACKEND != "jax", reason="a feature of JAX")
only_torch = pytest.mark.skipif(BACKEND != "torch", reason="a feature of torch")


def make_variables(*shapes, dtype="float32", value=1.0):
    """Returns one variable per shape, filled with `value`."""
    return [
        keras.Variable(np.full(shape, value), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(shapes)
    ]


def numbers(variables):
    """Returns copies of the values of variables as NumPy arrays."""
    return [
        np.array(ops.convert_to_numpy(ops.convert_to_tensor(v)))
        for v in variables
    ]


def assert_identical(actual, expected):
    """Bit for bit, NaN included."""
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def make_apply(optimizer, variables, mode):
    """Returns a function that applies a list of gradients in the given mode.

    The optimizer is built first, so that a compiled step is traced once.
    """
    if not optimizer.built:
        optimizer.build(variables)
    if mode == "jit":
        return _jitted(optimizer, variables)
    if mode in ("graph", "xla"):
        return _compiled(optimizer, variables, mode == "xla")

    def apply(gradients):
        optimizer.apply([as_tensor(g) for g in gradients], variables)

    return apply


def as_tensor(gradient):
    """Returns NumPy numbers as a tensor, and anything else as it is."""
    if isinstance(gradient, (np.ndarray, np.generic, float)):
        return ops.convert_to_tensor(gradient)
    return gradient


def _compiled(optimizer, variables, xla):
    import tensorflow as tf

    @tf.function(jit_compile=xla)
    def step(gradients):
        optimizer.apply(gradients, variables)

    return lambda gradients: step([as_tensor(g) for g in gradients])


def _jitted(optimizer, variables):
    import jax

    assert {id(v) for v in variables} == {
        id(v) for v in optimizer._trainable_variables
    }
    state = optimizer.variables

    @jax.jit
    def step(own, gradients, weights):
        return optimizer.stateless_apply(own, gradients, weights)

    def apply(gradients):
        new_weights, new_state = step(
            [v.value for v in state],
            [as_tensor(g) for g in gradients],
            [v.value for v in variables],
        )
        for variable, value in zip(variables, new_weights, strict=True):
            variable.assign(value)
        for variable, value in zip(state, new_state, strict=True):
            variable.assign(value)

    return apply
