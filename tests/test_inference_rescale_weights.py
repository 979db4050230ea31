"""Powers of two in weights: the same in float32, and right in float16."""

import contextlib
import json

import keras
import numpy as np
import pytest
from keras import layers
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.inference.rescale_weights import rescale_weights

BIG = keras.initializers.RandomNormal(stddev=200.0, seed=1)


def values(model, x):
    with np.errstate(over="ignore"):
        found = keras.ops.convert_to_numpy(model(x, training=False))
    return found.astype("float32")


def convolutions():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu", kernel_initializer=BIG)(inputs)
    x = layers.Conv2D(4, 3, kernel_initializer=BIG)(layers.MaxPooling2D()(x))
    # As training would leave it.
    variance = keras.initializers.Constant(1e12)
    x = layers.BatchNormalization(moving_variance_initializer=variance)(x)
    x = layers.ReLU()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(2, dtype="float32")(x))


def t5():
    (case,) = cases(["t5_ffn"])
    return case.model("float32", None)


def rms_norm():
    """Llama's block: a norm whose gain is large, products, and a norm."""
    inputs = keras.Input((8,))
    x = layers.Dense(8, kernel_initializer=BIG)(inputs)
    x = layers.RMSNormalization(name="norm", epsilon=0.25)(x)
    x = layers.Dense(64, "relu", kernel_initializer=BIG)(x)
    x = layers.Dense(8, kernel_initializer="glorot_uniform")(x)
    x = layers.Dense(2)(layers.LayerNormalization()(x))
    model = keras.Model(inputs, x)
    model.get_layer("norm").scale.assign(np.linspace(-3e4, 3e4, 8))
    return model


def in_float64(model, x):
    """What the same layers give in float64, with the weights of the model."""

    def cloned(layer):
        config = layer.get_config() | {"dtype": "float64"}
        return type(layer).from_config(config)

    with float64_on_jax():
        clone = keras.models.clone_model(model, clone_function=cloned)
        clone.set_weights(model.get_weights())
        exact = clone.predict(x, verbose=0)
    assert exact.dtype == "float64"
    return exact


def float64_on_jax():
    """JAX has no float64 unless asked; the other backends always have it."""
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)


IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
TOKENS = np.arange(24).reshape(2, 12) % 20
VECTORS = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
MODELS = {
    "convolutions": (convolutions, IMAGES),
    "t5": (t5, TOKENS),
    "rms_norm": (rms_norm, VECTORS),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_same_and_fits_float16(name, tmp_path):
    build, x = MODELS[name]
    model = build()
    known = values(model, x)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    assert not np.allclose(values(model, x), known, rtol=0.1)
    kmp.apply_policy(model, "float32")
    exact = in_float64(model, x)
    moved = rescale_weights(model, [x])
    assert moved
    # As the docstring argues, in any number of digits.
    np.testing.assert_array_equal(in_float64(model, x), exact)
    assert all(bits > 0 for bits in moved.values())
    np.testing.assert_array_equal(values(model, x), known)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    close = np.abs(values(model, x) - known).max() / np.abs(known).max()
    assert close < 0.02
    # Keras' own layers, which load without this package.
    assert "keras_mixprec" not in json.dumps(model.get_config())
    assert rescale_weights(model, [x]) == {}


def test_a_gain_takes_a_power_of_two_and_epsilon_the_square():
    model = rms_norm()
    moved = rescale_weights(model, [3000 * VECTORS])
    norm = model.get_layer("norm")
    assert norm.epsilon == 0.25 * 4.0 ** -moved["dense"]
    largest = 3e4 * 2.0 ** -moved["norm"]
    assert np.abs(np.array(norm.scale)).max() == largest


def test_a_normalization_without_a_gain_returns_what_it_did():
    inputs = keras.Input((4,))
    x = layers.LayerNormalization(scale=False, name="norm")(inputs)
    x = layers.Dense(4, name="last")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.get_layer("norm").beta.assign(np.full(4, 1e5))
    moved = rescale_weights(model, [np.ones((2, 4), "float32")])
    assert "norm" not in moved


def test_what_is_not_homogeneous_is_left_as_it_is():
    inputs = keras.Input((4,))
    x = layers.Dense(4, "gelu", kernel_initializer=BIG)(inputs)
    x = layers.Dense(4, kernel_initializer=BIG)(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.Activation("tanh")(x)))
    before = model.get_weights()
    x = 400 * np.ones((2, 4), "float32")
    assert rescale_weights(model, [x]) == {}
    for own, known in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, known)


@pytest.mark.filterwarnings("ignore:.*dict must match the names:UserWarning")
def test_inputs_are_known_by_the_names_of_their_dict():
    inputs = {"a": keras.Input((4,), name="one"), "b": keras.Input((4,))}
    x = layers.Add()([inputs["a"], inputs["b"]])
    x = layers.Dense(4, kernel_initializer=BIG, name="first")(x)
    x = layers.Dense(1)(layers.LayerNormalization()(x))
    batch = {k: 400 * np.ones((2, 4), "float32") for k in inputs}
    model = keras.Model(inputs, x)
    known = values(model, batch)
    assert rescale_weights(model, [batch])
    np.testing.assert_array_equal(values(model, batch), known)


def test_weights_with_lora_are_left_as_they_are():
    inputs = keras.Input((4,))
    x = layers.Dense(4, kernel_initializer=BIG, name="first")(inputs)
    x = layers.Dense(4, name="second")(x)
    model = keras.Model(inputs, layers.LayerNormalization()(x))
    model.get_layer("first").enable_lora(1)
    moved = rescale_weights(model, [400 * np.ones((2, 4), "float32")])
    assert list(moved) == ["second"]


def test_a_subclassed_model_is_refused():
    class Own(keras.Model):
        pass

    with pytest.raises(TypeError, match="must be functional.*type Own"):
        rescale_weights(Own(), [np.ones((1, 1))])
