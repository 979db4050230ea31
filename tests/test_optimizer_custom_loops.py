"""Custom training loops: the update is the true one whatever the scale."""

import keras
import numpy as np
import pytest
from keras import ops
from optimizer_models import (
    BACKEND,
    MODES,
    each_mode,
    make_variables,
    numbers,
    only_jax,
    only_torch,
)

from keras_mixprec import LossScaleOptimizer

# The gradient of 3 * w, whatever the loss scale.
TRUE = 3.0


def make(scale=8.0, growth_interval=1, built=True):
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0),
        initial_scale=scale,
        dynamic_growth_steps=growth_interval,
    )
    variables = make_variables((1,))
    if built:
        optimizer.build(variables)
    return optimizer, variables


def loss_of(weight):
    return ops.sum(weight) * TRUE


def train(optimizer, variables, steps, mode, change=lambda g: g):
    """Takes steps of the backend's idiomatic loop; returns the weights."""
    loop = {
        "tensorflow": tensorflow_loop,
        "jax": jax_loop,
        "torch": torch_loop,
    }[BACKEND]
    step = loop(optimizer, variables, change, mode)
    seen = []
    for _ in range(steps):
        step()
        seen.append(float(numbers(variables)[0][0]))
    return seen


def tensorflow_loop(optimizer, variables, change, mode):
    import tensorflow as tf

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(variables[0]))
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(change(gradients), variables)

    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "xla")


def jax_loop(optimizer, variables, change, mode):
    import jax

    def step(weights, own):
        def scaled(weights):
            loss = loss_of(weights[0])
            return optimizer.stateless_scale_loss(own, loss)

        gradients = jax.grad(scaled)(weights)
        with keras.StatelessScope(zip(optimizer.variables, own, strict=True)):
            gradients = change(gradients)
        return optimizer.stateless_apply(own, gradients, weights)

    step = step if mode == "eager" else jax.jit(step)
    groups = variables, optimizer.variables

    def run():
        new = step(*[[v.value for v in group] for group in groups])
        for group, values in zip(groups, new, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    return run


def torch_loop(optimizer, variables, change, mode):
    import torch

    def step():
        for variable in variables:
            variable.value.grad = None
        optimizer.scale_loss(loss_of(variables[0])).backward()
        gradients = [v.value.grad for v in variables]
        with torch.no_grad():
            optimizer.apply(change(gradients), variables)

    return step


@each_mode
def test_the_update_does_not_change_with_the_scale(mode):
    optimizer, variables = make()
    seen = train(optimizer, variables, 4, mode)
    assert seen == [1 - TRUE * k for k in (1, 2, 3, 4)]
    assert float(optimizer.loss_scale) == 8.0 * 2**4


# A stateless step on JAX takes the variables of a built optimizer.
@each_mode
@pytest.mark.parametrize("method", ["unscale", "get_unscaled_gradients"])
@pytest.mark.parametrize("built", [True, False][: 1 + (BACKEND != "jax")])
def test_unscale_clip_apply(built, method, mode):
    optimizer, variables = make(built=built)

    def clip(gradients):
        gradients = getattr(optimizer, method)(gradients)
        return [ops.clip(g, -2.0, 2.0) for g in gradients]

    assert train(optimizer, variables, 3, mode, clip) == [-1, -3, -5]
    assert list(optimizer.gradient_norms().values()) == [2.0]
    assert float(optimizer.loss_scale) == 64.0


@each_mode
def test_an_unscaled_bad_step_is_skipped(mode):
    optimizer, variables = make()

    def spoil(gradients):
        return [g * np.float32(np.nan) for g in optimizer.unscale(gradients)]

    assert train(optimizer, variables, 2, mode, spoil) == [1, 1]
    assert float(optimizer.loss_scale) == 2.0


def test_keras_2_names():
    optimizer, _ = make()
    assert float(optimizer.get_scaled_loss(ops.cast(3.0, "float16"))) == 24.0
    assert (
        float(optimizer.get_scaled_loss(lambda: ops.cast(2.0, "float32"))())
        == 16
    )
    halves = [ops.convert_to_tensor([4.0]), None]
    unscaled, none = optimizer.get_unscaled_gradients(halves)
    assert ops.convert_to_numpy(unscaled).tolist() == [0.5]
    assert none is None


def test_unscaling_what_is_unscaled_is_refused():
    optimizer, variables = make()
    gradients = [ops.convert_to_tensor([8.0])]
    unscaled = optimizer.unscale(gradients)
    with pytest.raises(ValueError, match="unscaled already"):
        optimizer.unscale(unscaled)
    optimizer.apply(unscaled, variables)
    with pytest.raises(ValueError, match="unscaled already"):
        optimizer.unscale(unscaled)
    np.testing.assert_array_equal(numbers(variables)[0], [0])
    optimizer.unscale(gradients)


@each_mode
def test_two_backward_passes_in_a_step(mode):
    """Sharpness-aware minimization unscales the gradients of both."""
    optimizer, variables = make()

    def ascend_then_descend(gradients):
        first = optimizer.unscale(gradients)
        (second,) = optimizer.unscale([g * 1.0 for g in gradients])
        return [second + 0 * first[0]]

    assert train(optimizer, variables, 3, mode, ascend_then_descend) == [
        -2,
        -5,
        -8,
    ]


def test_unscaled_gradients_applied_twice_are_divided_once():
    optimizer, variables = make()
    unscaled = optimizer.unscale([ops.convert_to_tensor([8.0])])
    for _ in range(2):
        optimizer.apply(unscaled, variables)
    np.testing.assert_array_equal(numbers(variables)[0], [-1])
    clipped = [ops.clip(optimizer.unscale([unscaled[0] * 64])[0], -1, 1)]
    for _ in range(2):
        optimizer.apply(clipped, variables)
    np.testing.assert_array_equal(numbers(variables)[0], [-3])


@only_torch
def test_gradients_unscaled_in_place_are_known_until_they_are_written():
    optimizer, (variable,) = make(growth_interval=100)
    optimizer.scale_loss(loss_of(variable)).backward()
    for _ in range(2):
        optimizer.apply([variable.value.grad])
    np.testing.assert_array_equal(numbers([variable])[0], [1 - 2 * TRUE])
    variable.value.grad.zero_()
    optimizer.scale_loss(loss_of(variable)).backward()
    optimizer.apply([variable.value.grad])
    np.testing.assert_array_equal(numbers([variable])[0], [1 - 3 * TRUE])


@only_jax
def test_a_jitted_step_of_keras_optimizer_freezes_the_scale():
    """The trap that `stateless_scale_loss` avoids, so that it stays known."""
    import jax

    optimizer, _ = make()
    frozen = jax.jit(optimizer.scale_loss)
    assert float(frozen(1.0)) == 8.0
    optimizer.dynamic_scale.assign(16.0)
    assert float(frozen(1.0)) == 8.0
    free = jax.jit(optimizer.stateless_scale_loss)
    assert float(free([v.value for v in optimizer.variables], 1.0)) == 16.0


@pytest.mark.parametrize("mode", MODES[-1:])
def test_a_fixed_scale(mode):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 1024)
    variables = make_variables((1,))
    optimizer.build(variables)
    assert train(optimizer, variables, 2, mode) == [-2, -5]
    assert float(optimizer.loss_scale) == 1024.0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="It has AutoGraph.")
def test_autograph_has_nothing_to_warn_of(caplog):
    import tensorflow as tf

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(optimizer.unscale(gradients), model.trainable_variables)
        return loss

    with caplog.at_level("WARNING", "tensorflow"):
        tf.get_logger().propagate = True
        step(tf.ones((4, 2)))
        tf.get_logger().propagate = False
    assert not caplog.records
