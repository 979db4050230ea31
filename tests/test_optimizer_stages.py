"""A step is scaled, unscaled or applied, whoever calls in whatever order."""

import threading

import keras
import numpy as np
import pytest
from keras import ops
from optimizer_models import (
    BACKEND,
    each_mode,
    make_variables,
    numbers,
    only_jax,
    only_tensorflow,
    only_torch,
)
from test_optimizer_custom_loops import TRUE, loss_of, make, train

from keras_mixprec import LossScaleOptimizer

SCALE = 8.0


def two():
    """An optimizer of two variables, of four numbers each."""
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=SCALE
    )
    variables = make_variables((4,), (2, 2))
    optimizer.build(variables)
    return optimizer, variables


def scaled_ones():
    return [ops.ones((4,)) * SCALE, ops.ones((2, 2)) * SCALE]


def assert_weights(variables, expected):
    for values in numbers(variables):
        np.testing.assert_array_equal(values, np.full_like(values, expected))


@each_mode
def test_looking_at_unscaled_gradients_changes_nothing(mode):
    optimizer, variables = make()

    def look(gradients):
        optimizer.unscale(gradients)
        return gradients

    assert train(optimizer, variables, 3, mode, look) == [-2, -5, -8]


@each_mode
def test_only_the_first_of_two_losses_is_unscaled(mode):
    """Sharpness-aware minimization that lets `apply` unscale the second."""
    optimizer, variables = make()

    def ascend(gradients):
        optimizer.unscale(gradients)
        optimizer.scale_loss(loss_of(variables[0]))
        return [g * 1.0 for g in gradients]

    assert train(optimizer, variables, 3, mode, ascend) == [-2, -5, -8]


@each_mode
def test_accumulated_by_hand(mode):
    optimizer, variables = make()

    def accumulate(gradients):
        first = optimizer.unscale(gradients)
        optimizer.scale_loss(loss_of(variables[0]))
        second = optimizer.unscale([g * 1.0 for g in gradients])
        return [a + b for a, b in zip(first, second, strict=True)]

    assert train(optimizer, variables, 2, mode, accumulate) == [-5, -11]


@pytest.mark.parametrize("looks", ["all", "one", "a norm", "written"])
def test_whatever_was_looked_at_scaled_gradients_are_divided(looks):
    optimizer, variables = two()
    gradients = scaled_ones()
    if looks == "a norm":
        optimizer.unscale([ops.norm(gradients[0])])
    else:
        optimizer.unscale(gradients[: 1 if looks == "one" else 2])
    if looks == "written" and BACKEND == "torch":
        gradients[0].mul_(1.0)
    optimizer.apply(gradients)
    assert_weights(variables, 0)
    # That step is over.
    optimizer.apply(scaled_ones())
    assert_weights(variables, -1)


def test_a_look_before_training_is_forgotten():
    optimizer, variables = make()
    optimizer.unscale([ops.ones((1,))])
    assert train(optimizer, variables, 2, "eager") == [-2, -5]


def test_a_look_before_fit_changes_no_loss():
    def losses(looks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(LossScaleOptimizer("sgd"), "mse")
        model.optimizer.build(model.trainable_variables)
        if looks:
            weights = model.trainable_variables
            model.optimizer.unscale([ops.ones(w.shape) for w in weights])
        x = np.ones((8, 4), "float32")
        return model.fit(x, x[:, :1], batch_size=4, verbose=0).history["loss"]

    assert losses(True) == losses(False)


@pytest.mark.parametrize("change", [lambda g: g, lambda g: ops.clip(g, -2, 2)])
def test_unscaled_in_another_thread(change):
    optimizer, variables = two()
    unscaled = []

    def unscale():
        unscaled.extend(map(change, optimizer.unscale(scaled_ones())))

    thread = threading.Thread(target=unscale)
    thread.start()
    thread.join()
    optimizer.apply(unscaled)
    assert_weights(variables, 0)


@pytest.mark.parametrize("kind", [np.asarray, lambda g: np.asarray(g).tolist()])
def test_gradients_that_are_no_tensors(kind):
    def plain(tensors):
        return [kind(ops.convert_to_numpy(t)) for t in tensors]

    optimizer, variables = two()
    optimizer.apply(plain(optimizer.unscale(plain(scaled_ones()))))
    assert_weights(variables, 0)
    gradients = plain(scaled_ones())
    optimizer.unscale(gradients)
    optimizer.apply(gradients)
    assert_weights(variables, -1)


def test_a_part_that_is_unscaled_is_refused():
    optimizer, variables = two()
    gradients = scaled_ones()
    mixed = [optimizer.unscale(gradients[:1])[0], gradients[1]]
    for others in ([gradients[1]], [gradients[1] * 1.0]):
        with pytest.raises(ValueError, match="Wrong:(?s:.*)Right:"):
            optimizer.apply([mixed[0], *others])
    assert_weights(variables, 1)
    assert optimizer.attempted_steps == 0
    optimizer.apply(gradients)
    assert_weights(variables, 0)


@only_torch
def test_gradients_of_weights_that_are_written_again():
    optimizer, (variable,) = make(growth_interval=100)
    for step in range(1, 4):
        if variable.value.grad is not None:
            variable.value.grad.zero_()
        # Without `scale_loss`, which would begin a step.
        (loss_of(variable) * SCALE).backward()
        optimizer.unscale([variable.value.grad])
        optimizer.apply([variable.value.grad])
        assert numbers([variable])[0] == 1 - TRUE * step


@only_tensorflow
@pytest.mark.parametrize("unscaled_in", ["eager", "graph"])
def test_a_compiled_apply_of_what_was_unscaled_outside_is_refused(unscaled_in):
    import tensorflow as tf

    optimizer, _ = two()
    unscale = optimizer.unscale
    if unscaled_in == "graph":
        unscale = tf.function(unscale)
    unscale(scaled_ones())
    with pytest.raises(ValueError, match="Wrong:(?s:.*)Right"):
        tf.function(optimizer.apply)(scaled_ones())


@only_tensorflow
def test_functions_within_a_compiled_one_are_one_step():
    import tensorflow as tf

    optimizer, variables = two()

    @tf.function
    def clipped(gradients):
        return [ops.clip(g, -2, 2) for g in optimizer.unscale(gradients)]

    @tf.function
    def step(gradients):
        optimizer.apply(clipped(gradients), variables)

    step(scaled_ones())
    assert_weights(variables, 0)


@only_jax
def test_traces_leak_no_stage():
    import jax

    optimizer, variables = two()

    def own():
        return [v.value for v in optimizer.variables]

    def unscale(own, gradients):
        mapping = list(zip(optimizer.variables, own, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.unscale(gradients)

    def step(own, gradients, weights):
        clipped = jax.jit(lambda *given: unscale(*given))(own, gradients)
        clipped = [ops.clip(g, -2, 2) for g in clipped]
        return optimizer.stateless_apply(own, clipped, weights)

    apply = jax.jit(optimizer.stateless_apply)
    weights = [v.value for v in variables]
    # Nested functions are one step.
    new, _ = jax.jit(step)(own(), scaled_ones(), weights)
    np.testing.assert_array_equal(new[0], np.zeros(4))
    for look in (unscale, jax.jit(unscale)):
        look(own(), scaled_ones())
        with pytest.raises(ValueError, match="Wrong:(?s:.*)Right"):
            apply(own(), scaled_ones(), weights)
        optimizer.scale_loss(1.0)
    new, _ = apply(own(), scaled_ones(), weights)
    np.testing.assert_array_equal(new[0], np.zeros(4))
    # A trace that was left before its end.
    jax.eval_shape(lambda *given: unscale(*given), own(), scaled_ones())
    with pytest.raises(ValueError, match="Wrong:(?s:.*)Right"):
        optimizer.apply(scaled_ones())
