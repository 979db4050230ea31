"""`diagnose` on layers that draw random numbers."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import each_jit
from optimizer_models import BACKEND

import keras_mixprec as kmp
from keras_mixprec.numerics.dry_step import dry_step, exact_step

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = RANDOM.normal(size=(16, 1)).astype("float32")


def with_layer(layer, rules=("dense_out",)):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = layer(layers.Dense(8, name="dense_in")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="dense_out")(x))
    wide = [kmp.PrecisionRule(name) for name in rules]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    optimizer = kmp.LossScaleOptimizer("adam", initial_scale=2.0**8)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def found(model):
    return [(v.layer, v.kind) for v in kmp.diagnose(model, X, Y)]


class Drawing(layers.Layer):
    """Adds a function of random numbers of the dtype of its input."""

    def __init__(self, function, seeded=True, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.seed = keras.random.SeedGenerator(1) if seeded else None

    def call(self, x):
        return x + self.function(ops.shape(x), x.dtype, self.seed)


def minus_log_of_zero(shape, dtype, seed):
    u = keras.random.uniform(shape, dtype=dtype, seed=seed)
    return -ops.log(u + 1e-20)


def exponential(shape, dtype, seed):
    # Of 1 only if it is drawn in float32 and rounded.
    return -ops.log(1 - keras.random.uniform(shape, dtype=dtype, seed=seed))


def gumbel(shape, dtype, seed):
    u = keras.random.uniform(shape, 1e-3, 1.0, dtype=dtype, seed=seed)
    return -ops.log(-ops.log(u))


def gaussian(shape, dtype, seed):
    return keras.random.normal(shape, dtype=dtype, seed=seed)


def truncated(shape, dtype, seed):
    return keras.random.truncated_normal(shape, dtype=dtype, seed=seed)


def in_float32(shape, dtype, seed):
    return ops.cast(gaussian(shape, "float32", seed), dtype)


def a_class(shape, dtype, seed):
    drawn = keras.random.categorical(
        ops.zeros((1, 8), dtype) + 0.1, 1, seed=seed
    )
    return ops.cast(drawn, dtype)


SOUND = [exponential, gumbel, gaussian, truncated, in_float32, a_class]


@pytest.mark.parametrize("function", SOUND)
def test_sound_random_numbers_are_not_blamed(function):
    assert found(with_layer(Drawing(function, name="noise"))) == []


def test_a_zero_that_only_float16_draws_is_found():
    # Once in 1,024 or 2,048 numbers: of this batch's 128 hardly ever.
    model = with_layer(Drawing(minus_log_of_zero, name="noise"))
    assert found(model) == [("noise", "underflow")]


@pytest.mark.skipif(BACKEND == "jax", reason="Keras on JAX wants a generator.")
def test_numbers_without_a_generator_are_those_of_the_step():
    model = with_layer(Drawing(gaussian, seeded=False, name="noise"))
    keras.random.normal((1,))
    assert found(model) == []


def test_the_reference_is_given_the_numbers_of_the_step_widened():
    model = with_layer(Drawing(gaussian, name="noise"))
    model.optimizer.build(model.trainable_variables)
    data = ops.convert_to_tensor(X), ops.convert_to_tensor(Y)
    low = dry_step(model, data, 1.0)
    exact = exact_step(model, data)
    assert exact.draws == low.draws == [("normal", "float16")]
    noise = [
        ops.convert_to_numpy(c.outputs).astype("float64")
        - ops.convert_to_numpy(c.args[0])
        for step in (low, exact)
        for c in step.calls
        if c.path == "noise"
    ]
    np.testing.assert_allclose(*noise, atol=4e-3)  # Twice an ulp of 4.
    assert {c.outputs.dtype for c in exact.calls} != {
        c.outputs.dtype for c in low.calls
    }


def native(name):
    """Returns a function that draws by the backend's own means."""

    def draw(shape, dtype, seed):
        if BACKEND == "torch":
            import torch

            function = {"uniform": torch.rand, "normal": torch.randn}[name]
            return function(tuple(shape), dtype=dtype)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return getattr(tf.random, name)(shape, dtype=dtype)
        import jax

        keys = jax.random.split(jax.random.wrap_key_data(seed.next()))
        return getattr(jax.random, name)(keys[0], shape, dtype)

    return draw


def test_a_generator_of_the_layers_own_is_checked():
    def unsafe(*arguments):
        return -ops.log(native("uniform")(*arguments) + 1e-20)

    model = with_layer(Drawing(unsafe, name="noise"))
    assert found(model) == [("noise", "underflow")]


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_a_sound_generator_of_the_layers_own_is_not_blamed(name):
    def overflow_elsewhere(*arguments):
        return 5 * native(name)(*arguments)

    assert found(with_layer(Drawing(overflow_elsewhere, name="noise"))) == []


def test_what_overflows_beside_a_generator_of_its_own_is_found():
    def large(*arguments):
        drawn = 1e3 * native("normal")(*arguments)
        return ops.sqrt(drawn * drawn)

    model = with_layer(Drawing(large, name="noise"))
    assert found(model)[0] == ("noise", "forward_overflow")


class Faint(layers.Layer):
    """Half of what it is given, made too small for float16."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, x, training=None):
        return self.dropout(x, training=training) * 1e-5 * 1e-4


@each_jit
def test_other_draws_in_xla_do_not_hide_a_fault(jit):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    ends = [layers.Rescaling(1e9, dtype="float32"), layers.Dense(1)]
    parts = layers.Dense(8), Faint(name="faint"), *ends
    model = keras.Sequential([keras.Input((8,)), *parts])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(32, 8))
    found = [(v.kind, v.layer) for v in kmp.diagnose(model, x, x[:, :1])]
    assert found == [("underflow", "faint")]
