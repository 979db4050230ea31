"""10,000 bad steps, and 10,000 steps without any gradient to speak of."""

import keras
import numpy as np
import pytest
from optimizer_models import (
    MODES,
    each_mode,
    make_apply,
    make_variables,
    numbers,
)

from keras_mixprec import DynamicLossScale, LossScaleOptimizer

LONG = 10_000
# Op by op a step takes a millisecond; torch has no other mode.
SHORT = 400
BOUNDS = {
    "default bounds": ({}, 2.0**-14, 2.0**32),
    "no bounds": (
        {"min_scale": None, "max_scale": None},
        2.0**-126,
        2.0**126,
    ),
}
RUNS = [
    (
        mode,
        LONG if mode != "eager" or (MODES == ("eager",) and default) else SHORT,
        *BOUNDS[name],
    )
    for mode in MODES
    for name, default in (("default bounds", True), ("no bounds", False))
]
each_run = pytest.mark.parametrize(
    ("mode", "times", "bounds", "low", "high"),
    RUNS,
    ids=[
        f"{mode}-{times}-{'no' if b else 'default'} bounds"
        for mode, times, b, *_ in RUNS
    ],
)


def make(bounds):
    rule = DynamicLossScale(2.0**15, growth_interval=2, **bounds)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), rule)
    variables = make_variables((2,))
    optimizer.build(variables)
    return optimizer, variables


def repeat(optimizer, variables, gradient, times, mode):
    gradient = np.asarray(gradient, "float32")
    if mode in ("graph", "xla"):
        return in_a_tensorflow_loop(
            optimizer, variables, gradient, times, mode == "xla"
        )
    if mode == "jit":
        return in_a_jax_loop(optimizer, variables, gradient, times)
    apply = make_apply(optimizer, variables, mode)
    for _ in range(times):
        apply([gradient])
    return None


def in_a_tensorflow_loop(optimizer, variables, gradient, times, xla):
    import tensorflow as tf

    @tf.function(jit_compile=xla)
    def run(gradient):
        for _ in tf.range(times):
            optimizer.apply([gradient], variables)

    run(tf.constant(gradient))


def in_a_jax_loop(optimizer, variables, gradient, times):
    import jax

    @jax.jit
    def run(weights, own, gradient):
        def body(_, state):
            weights, own = state
            return optimizer.stateless_apply(own, [gradient], weights)

        return jax.lax.fori_loop(0, times, body, (weights, own))

    both = variables, optimizer.variables
    start = [[v.value for v in group] for group in both]
    end = run(*start, gradient)
    for group, values in zip(both, end, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


@pytest.mark.slow
@each_run
def test_bad_steps_do_no_harm_and_training_resumes(
    mode, times, bounds, low, high
):
    optimizer, variables = make(bounds)
    repeat(optimizer, variables, [np.nan, np.inf], times, mode)
    assert float(optimizer.loss_scale) == low
    assert optimizer.skipped_steps == times
    np.testing.assert_array_equal(numbers(variables)[0], [1, 1])
    repeat(optimizer, variables, [low, 2 * low], 1, mode)
    np.testing.assert_array_equal(numbers(variables)[0], [0.5, 0])
    repeat(optimizer, variables, [0, 0], 3, mode)
    assert float(optimizer.loss_scale) == 4 * low
    assert int(optimizer.iterations) == 4
    assert not optimizer.last_step_skipped


@pytest.mark.slow
@each_run
def test_steps_without_gradient_leave_a_usable_scale(
    mode, times, bounds, low, high
):
    optimizer, variables = make(bounds)
    repeat(optimizer, variables, [0, 0], times, mode)
    assert float(optimizer.loss_scale) == high
    assert int(optimizer.iterations) == times
    repeat(optimizer, variables, [high, 2 * high], 1, mode)
    np.testing.assert_array_equal(numbers(variables)[0], [0.5, 0])
    assert optimizer.skipped_steps == 0


@each_mode
def test_alternating_good_and_bad_steps(mode):
    """A GAN's worst case: the scale must come back from its floor."""
    optimizer, variables = make({})
    for _ in range(3):
        repeat(optimizer, variables, [np.inf, 0], 40, mode)
        assert float(optimizer.loss_scale) == 2.0**-14
        repeat(optimizer, variables, [0, 0], 10, mode)
        assert float(optimizer.loss_scale) == 2.0**-9
    assert optimizer.attempted_steps == 150
