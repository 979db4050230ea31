"""Weights, constants and random numbers that 16 bits do not hold."""

import keras
import numpy as np
import pytest
from diagnosis_models import (
    Own,
    compiled,
    demoted,
    everything,
    found,
    in_float16,
    model_of,
    tuned,
)
from keras import layers, ops
from monitor_models import BACKEND, JIT, each_jit, not_jax, one_backend
from zoo.parts import dense

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = RANDOM.normal(size=(16, 1)).astype("float32")


def with_kernel(change, scale=1e-4, name="dense"):
    after = layers.Rescaling(scale, name="next")
    model = model_of(dense(8, name=name), after, wide=["next"])
    kernel = model.layers[1].kernel
    kernel.assign(change(ops.convert_to_numpy(kernel).copy()))
    return model


def one_of(value):
    def change(kernel):
        kernel[3, 5] = value
        return kernel

    return change


def test_a_weight_that_overflows_in_its_cast():
    model = with_kernel(one_of(1e5))
    (verdict,) = kmp.diagnose(model, X)
    assert (verdict.layer, verdict.kind) == ("dense", "weight_overflow")
    expected = {"variable": "kernel", "largest_weight": 1e5}
    assert verdict.numbers == expected | {"weights": 1, "of": 64}
    assert "65504" in verdict.advice
    model.compile("sgd", "mse", jit_compile=False)
    assert found(model, X, X)[0] == ("dense", "weight_overflow")


def test_whatever_the_model_is_given():
    ids = keras.Input((3,), dtype="int32")
    words = layers.Embedding(10, 8, name="words")
    model = in_float16(keras.Sequential([ids, words]))
    table = np.ones((10, 8))
    table[9] = 7e4
    words.embeddings.assign(table)
    (verdict,) = kmp.diagnose(model, np.arange(6).reshape(2, 3))
    assert (verdict.layer, verdict.kind) == ("words", "weight_overflow")
    assert verdict.numbers["weights"] == 8


def test_weights_that_vanish_in_their_cast():
    model = with_kernel(lambda kernel: 1e-8 * kernel, 1e8)
    before = everything(model)[0]
    (verdict,) = kmp.diagnose(model, X)
    assert (verdict.layer, verdict.kind) == ("dense", "weight_underflow")
    np.testing.assert_array_equal(everything(model)[0], before)
    assert verdict.numbers["variable"] == "kernel"
    assert verdict.numbers["weights"] > 32
    assert verdict.numbers["largest_weight"] < 2**-25


def vanishing_beside(kernel):
    return kernel * np.where(RANDOM.uniform(size=(8, 8)) < 0.5, 1, 1e-9)


def masked():
    mask = np.where(np.arange(8) % 2, -1e9, 0.0)
    return model_of(Own(lambda x, mask: ops.softmax(x + mask), mask))


@pytest.mark.parametrize(
    "build",
    [
        lambda: with_kernel(one_of(65504.0)),
        lambda: with_kernel(one_of(-65519.0)),
        lambda: with_kernel(one_of(1e-12)),
        lambda: with_kernel(vanishing_beside),
        masked,
    ],
)
def test_weights_that_fit_or_that_do_not_matter(build):
    assert found(build(), 0.1 * X) == []


def test_the_cell_of_a_recurrent_layer():
    lstm = layers.LSTM(4, name="lstm")
    model = model_of(layers.Reshape((4, 2)), lstm)
    lstm.cell.kernel.assign(np.full((2, 16), 1e5))
    assert found(model, X) == [("lstm", "weight_overflow")]


# A network that is known to overflow.


@pytest.mark.long
def test_the_decoder_of_an_autoencoder():
    up = {"up_1": "relu", "up_2": None}
    up = [
        layers.Conv2DTranspose(8, 3, 2, "same", activation=f, name=name)
        for name, f in up.items()
    ]
    first = layers.Dense(128, "relu", name="first")
    last = layers.Conv2D(3, 3, padding="same", activation="tanh", name="last")
    parts = first, layers.Reshape((4, 4, 8)), *up, last
    model = model_of(*parts, wide=["last"])
    assert found(model, X) == []
    first.kernel.assign(300 * first.kernel)
    up[0].kernel.assign(1e4 * up[0].kernel)
    expected = {"up_1": "forward_overflow", "up_2": "cast_overflow"}
    assert dict(found(model, X)) == expected


# Statistics beyond float16.

METRES = np.random.default_rng(0).uniform(1e3, 6e3, size=(64, 1))
METRES = METRES.astype("float32")
FAR = METRES, (METRES - 3e3) / 1e3


def given():
    """Its variance, of about 2e6, is infinite in float16."""
    return layers.Normalization(mean=[3e3], variance=[2e6], name="norm")


def adapted():
    layer = layers.Normalization(name="norm")
    layer.adapt(METRES)
    return layer


def trained_by(layer):
    keras.config.set_dtype_policy("mixed_float16")
    parts = layer, dense(8, "tanh"), dense(1, dtype="float32")
    model = model_of(*parts, shape=(1,), policy="mixed_float16")
    return compiled(model, jit=JIT)


@pytest.mark.long
@pytest.mark.parametrize("layer", [given, adapted])
def test_statistics_follow_the_policy(layer):
    model = trained_by(layer)

    def normalized():
        values = model.get_layer("norm")(METRES)
        return ops.convert_to_numpy(values).astype("float64")

    before = normalized()
    assert (before == 0).all()
    assert [path for path, _ in found(model, *FAR) if path] == ["norm"]
    np.testing.assert_array_equal(normalized(), before)
    assert demoted(tuned(model, *FAR, 16, epochs=2)) >= {"norm"}
    assert model.get_layer("norm").compute_dtype == "float32"
    mean, variance = (METRES.mean(), METRES.var())
    if layer is given:
        mean, variance = 3e3, 2e6
    exact = (METRES.astype("float64") - mean) / np.sqrt(variance)
    # A few roundings of float32, of numbers up to 6e3 before the division.
    np.testing.assert_allclose(normalized(), exact, atol=1e-5)


# Random numbers.


class Drawing(layers.Layer):
    """Adds a function of random numbers of the dtype of its input."""

    def __init__(self, function, seeded=True):
        super().__init__(name="noise")
        self.function = function
        self.seed = keras.random.SeedGenerator(1) if seeded else None

    def call(self, x):
        return x + self.function(ops.shape(x), x.dtype, self.seed)


def with_noise(function, **arguments):
    parts = dense(8), Drawing(function, **arguments), dense(1, name="head")
    return compiled(model_of(*parts, wide=["head"]), initial_scale=2.0**8)


def uniform(shape, dtype, seed, low=0.0):
    return keras.random.uniform(shape, low, 1.0, dtype=dtype, seed=seed)


def gaussian(shape, dtype, seed):
    return keras.random.normal(shape, dtype=dtype, seed=seed)


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


def large(*drawn):
    many = 1e3 * native("normal")(*drawn)
    return ops.sqrt(many * many)


# A function of numbers, and what is found of it first, if anything.
DRAWN = {
    # The log is 0 only if the number is drawn in float32 and rounded to 1.
    "exponential": (lambda *drawn: -ops.log(1 - uniform(*drawn)), None),
    "gaussian": (gaussian, None),
    "in float32": (
        lambda n, dtype, seed: ops.cast(gaussian(n, "float32", seed), dtype),
        None,
    ),
    "native normal": (lambda *drawn: 5 * native("normal")(*drawn), None),
    "overflow beside": (large, "forward_overflow"),
}
OFTEN = "gaussian", "native normal"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OFTEN else one_backend)
        for name in DRAWN
        # JAX draws other numbers in float16 from the same key.
        if name != "native normal" or BACKEND != "jax"
    ],
)
def test_random_numbers_that_float16_spoils_are_found(name):
    function, kind = DRAWN[name]
    said = found(with_noise(function), X, Y)
    assert said[:1] == ([("noise", kind)] if kind else [])


@not_jax  # Keras on JAX wants a generator.
def test_numbers_without_a_generator_are_those_of_the_step():
    model = with_noise(gaussian, seeded=False)
    keras.random.normal((1,))
    assert found(model, X, Y) == []


class Faint(layers.Layer):
    """Half of what it is given, made too small for float16."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, x, training=None):
        return self.dropout(x, training=training) * 1e-5 * 1e-4


@pytest.mark.long
@each_jit
def test_other_draws_in_xla_do_not_hide_a_fault(jit):
    keras.config.set_dtype_policy("mixed_float16")
    large = layers.Rescaling(1e9, dtype="float32")
    parts = dense(8), Faint(name="faint"), large, dense(1)
    model = compiled(model_of(*parts, policy="mixed_float16"), jit=jit)
    assert found(model, X, Y) == [("faint", "underflow")]
