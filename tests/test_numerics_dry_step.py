"""Optimizers are held while a step is run dry."""

import keras
import numpy as np
import pytest
from keras import ops
from optimizer_models import assert_identical, make_variables, numbers

import keras_mixprec as kmp
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import (
    compiled_loss,
    compiled_step,
    dry_step,
)
from keras_mixprec.numerics.held_optimizers import Held


def test_optimizers_that_skip_together_are_held():
    variables = make_variables((2,), (3,))
    before = numbers(variables)
    steps = []
    for variable in variables:
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam())
        optimizer.build([variable])
        gradient = ops.ones(variable.shape)
        steps.append((optimizer, [gradient], [variable]))
    first, second = (step[0] for step in steps)
    held = Held(lambda optimizer: 4.0)
    with held.holding():
        assert float(first.scale_loss(ops.ones(()))) == 4.0
        kmp.LossScaleOptimizer.apply_together(*steps)
    assert_identical(numbers(variables), before)
    losses, gradients, _ = held.taken()
    assert losses == [1.0]
    assert set(gradients) == {id(v) for v in variables}
    assert first.attempted_steps == 0
    kmp.LossScaleOptimizer.apply_together(*steps)
    assert first.attempted_steps == second.attempted_steps == 1


def test_a_dry_step_leaves_no_gradients_behind():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.steps_taken = keras.Variable(0, dtype="int32", trainable=False)
    x = ops.convert_to_tensor(np.ones((4, 2), "float32"))
    step = dry_step(model, (x, x[:, :1]), 2.0)
    assert len(step.gradients) == 2
    for variable in model.trainable_variables:
        assert getattr(variable.value, "grad", None) is None


def test_the_compiled_loss_is_that_of_the_step():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    jit_compile = keras.backend.backend() != "torch"
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 2)), random.normal(size=(64, 3))
    before = [np.array(v) for v in model.variables]
    for _ in range(2):
        kernel, bias = (np.array(v, "float64") for v in model.weights)
        expected = np.mean((x @ kernel + bias - y) ** 2)
        batch = tuple(ops.convert_to_tensor(a, "float32") for a in (x, y))
        # float32 sums of 192 terms.
        assert compiled_loss(model, batch) == pytest.approx(expected, rel=1e-5)
        assert_identical(numbers(model.variables), before)
        model.train_on_batch(*batch)
        before = numbers(model.variables)
        random.shuffle(x)


def test_a_compiled_step_has_the_gradient_of_an_embedding():
    """Of which an uncompiled one has rows, on TensorFlow."""
    keras.config.set_dtype_policy("mixed_float16")
    tokens = keras.layers.Embedding(5, 3, name="tokens")
    model = keras.Sequential([keras.Input((4,), dtype="int32"), tokens])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=True)
    model.optimizer.build(model.trainable_variables)
    data = np.array([[0, 1, 1, 4]]), np.ones((1, 4, 3), "float32")
    data = tuple(map(ops.convert_to_tensor, data))
    steps = dry_step(model, data, 1.0), compiled_step(model, data, 1.0)
    found = [to_array(s.gradients[id(tokens.embeddings)]) for s in steps]
    assert found[0].shape == (5, 3)
    # Of two in float16, in whichever order they are added.
    np.testing.assert_allclose(*found, rtol=2**-9)


def test_the_cotangents_of_a_16_bit_step_are_those_that_arrive():
    keras.config.set_dtype_policy("mixed_float16")
    third = keras.layers.Rescaling(1 / 3, name="third")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            third,
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )
    model.compile("sgd", loss="mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    x = np.arange(1, 5, dtype="float32")[:, None]
    data = ops.convert_to_tensor(x), ops.convert_to_tensor(0 * x)
    step = dry_step(model, data, 2.0**8)
    first, *_ = step.calls
    narrow = np.float16
    predicted = (x.astype(narrow) * narrow(1 / 3)).astype("float32")
    arrives = (2.0**8 * 2 * predicted / 4).astype(narrow) * narrow(1 / 3)
    (cotangent,) = first.cotangents
    np.testing.assert_array_equal(
        ops.convert_to_numpy(ops.cast(cotangent, "float32")),
        arrives.astype("float32"),
    )


def test_a_layer_is_given_the_cotangents_of_the_exact_step():
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(8, "tanh", name=name) for name in "abc"]
    model = keras.Sequential([keras.Input((8,)), *dense])
    model.compile("sgd", loss="mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    data = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
    data = tuple(map(keras.ops.convert_to_tensor, data))
    exact = dry_step(model, data, 1.0)
    # As if the layers after `a` had lost their gradients.
    for call in exact.calls[1:]:
        call.cotangents = [c * 0 for c in call.cotangents]
    known = {call.name: call for call in exact.calls}
    step = dry_step(model, data, 4.0, known)
    kept, *lost = (
        np.abs(keras.ops.convert_to_numpy(step.gradients[id(layer.kernel)]))
        for layer in dense
    )
    expected = exact.gradients[id(dense[0].kernel)]
    expected = np.abs(keras.ops.convert_to_numpy(expected))
    np.testing.assert_allclose(kept, 4 * expected, rtol=1e-5)
    assert not np.any(lost)
