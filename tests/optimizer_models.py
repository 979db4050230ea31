"""Optimizers stepped by hand: op by op, in a compiled graph, under XLA."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_mixprec import LossScaleOptimizer

BACKEND = keras.backend.backend()
MODES = {
    "tensorflow": ("eager", "graph", "xla"),
    "jax": ("eager", "jit"),
    "torch": ("eager",),
}[BACKEND]
COMPILED = [mode for mode in MODES if mode != "eager"]
# Arguments of `compile` that avoid tracing, for tests that do not depend on it.
QUICK = {
    "tensorflow": {"run_eagerly": True},
    "jax": {},
    "torch": {"jit_compile": False},
}[BACKEND]


# The last and op by op; what comes between is slow.
each_mode = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(m, marks=[pytest.mark.slow] if m == "graph" else [])
        for m in MODES
    ],
)


def rarely(*values):
    """A case of a parametrization that is slow elsewhere than on torch."""
    return pytest.param(*values, marks=pytest.mark.one_backend)


def over_modes(names, cases, quick=4):
    """Parametrizes by dict of tuples `cases` and by mode.

    Each case runs in one mode, the modes in turn. In the others it is slow, and
    so are all but about `quick` of them where steps are compiled.
    """
    every = max(len(cases) // quick, 1) if COMPILED else 1
    return pytest.mark.parametrize(
        f"{names},mode",
        [
            pytest.param(
                *case,
                mode,
                id=f"{name}-{mode}",
                marks=[pytest.mark.slow]
                if i % every or (i // every - j) % len(MODES)
                else [],
            )
            for i, (name, case) in enumerate(cases.items())
            for j, mode in enumerate(MODES)
        ],
    )


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


def stepper(mode, *shapes, inner="sgd", dtype="float32", value=1.0, **named):
    """Returns an optimizer, variables, and a function to apply gradients."""
    variables = make_variables(*shapes, dtype=dtype, value=value)
    optimizer = LossScaleOptimizer(inner, **named)
    return optimizer, variables, make_apply(optimizer, variables, mode)


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
    step = stateless(jax.jit(optimizer.stateless_apply), optimizer, variables)
    return lambda gradients: step([as_tensor(g) for g in gradients])


def stateless(step, optimizer, variables):
    """Returns a function that reads and writes variables for a JAX function.

    The JAX function gets the values of the optimizer's variables, its arguments
    and the values of `variables`. It returns new values of `variables`, then of
    the optimizer's.
    """

    def run(*arguments):
        groups = variables, optimizer.variables
        weights, own = ([v.value for v in group] for group in groups)
        new = step(own, *arguments, weights)
        for group, values in zip(groups, new, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    return run


def run_python(code, *arguments, **environment):
    """Runs code in a new process, where warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *arguments],
        env=os.environ | {"KERAS_BACKEND": BACKEND} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
