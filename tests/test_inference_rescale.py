"""Layers that stay in 16 bits, with rescaled weights or clamped outputs."""

import json

import keras
import numpy as np
import pytest
from keras import layers
from zoo import CASES

import keras_mixprec as kmp
from keras_mixprec.inference.rescale_weights import rescale_weights

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(1, 3, size=(64, 8)).astype("float32")
ONES = 400 * np.ones((2, 4), "float32")
IMAGES = RANDOM.normal(size=(4, 8, 8, 3)).astype("float32")
TOKENS = np.arange(24).reshape(2, 12) % 20
VECTORS = RANDOM.normal(size=(16, 8)).astype("float32")
BIG = keras.initializers.RandomNormal(stddev=200.0, seed=1)


def big(units=4, *arguments, **options):
    return layers.Dense(units, *arguments, kernel_initializer=BIG, **options)


def convolutions():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu", kernel_initializer=BIG)(inputs)
    x = layers.Conv2D(4, 3, kernel_initializer=BIG)(layers.MaxPooling2D()(x))
    # As training would leave it.
    variance = keras.initializers.Constant(1e12)
    x = layers.BatchNormalization(moving_variance_initializer=variance)(x)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    return keras.Model(inputs, layers.Dense(2, dtype="float32")(x))


def t5():
    return CASES["t5_ffn"].model("float32", None)


def rms_norm():
    """Llama's block: a norm whose gain is large, products, and a norm."""
    inputs = keras.Input((8,))
    norm = layers.RMSNormalization(name="norm", epsilon=0.25)
    x = big(64, "relu")(norm(big(8, name="first")(inputs)))
    x = layers.LayerNormalization()(layers.Dense(8)(x))
    model = keras.Model(inputs, layers.Dense(2)(x))
    norm.scale.assign(np.linspace(-3e4, 3e4, 8))
    return model


def sequential():
    """Made from its config, it has called its layers more than once."""
    stack = [layers.Dense(64, "relu"), layers.Dense(64)]
    parts = [keras.Input((8,)), *stack, layers.LayerNormalization()]
    model = keras.Sequential(parts)
    for layer in stack:
        layer.kernel.assign(1000.0 * layer.kernel)
    return model


def values(model, x):
    with np.errstate(over="ignore"):
        found = keras.ops.convert_to_numpy(model(x, training=False))
    return found.astype("float32")


def assert_weights(model, known):
    for own, before in zip(model.get_weights(), known, strict=True):
        np.testing.assert_array_equal(own, before)


def assert_loads_the_same(small, x, folder):
    """A file has the powers of two, and Keras' own layers only."""
    assert "keras_mixprec" not in json.dumps(small.get_config())
    small.save(folder / "small.keras")
    loaded = keras.saving.load_model(folder / "small.keras")
    y = small.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), y)


def converted(model, x=X, **kwargs):
    return kmp.convert_for_inference(model, "float16", calibration=x, **kwargs)


def row(report, path):
    (found,) = [row for row in report.layers if row["path"] == path]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "x", "wide"),
    [
        (convolutions, IMAGES, {"dense"}),
        (t5, TOKENS, set()),
        (rms_norm, VECTORS, set()),
        (sequential, X, set()),
    ],
)
def test_a_conversion_rescales_weights_where_a_layer_would_be_wide(
    build, x, wide, tmp_path
):
    model = build()
    before = model.get_weights()
    small, report = converted(model, x)
    assert {*report.wide_layers} <= wide
    moved = {r["path"]: r["rescaled_bits"] for r in report.layers}
    path = next(path for path, bits in moved.items() if bits)
    assert f"2**-{moved[path]}" in report.plan.reasons[path]
    assert row(report, path)["headroom_bits"] >= 2
    assert report.drift[0]["relative"] < 0.01
    assert_weights(model, before)
    assert_loads_the_same(small, x, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "x"), [(convolutions, IMAGES), (t5, TOKENS), (rms_norm, VECTORS)]
)
def test_rescaled_weights_give_the_same(build, x):
    model = build()
    known = values(model, x)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    assert not np.allclose(values(model, x), known, rtol=0.1)
    kmp.apply_policy(model, "float32")
    moved = rescale_weights(model, [x])
    assert moved
    assert all(bits > 0 for bits in moved.values())
    np.testing.assert_array_equal(values(model, x), known)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    close = np.abs(values(model, x) - known).max() / np.abs(known).max()
    assert close < 0.02
    assert rescale_weights(model, [x]) == {}


def without_gain():
    """What returned 1e5 did so by its offset, which has nowhere to go."""
    norm = layers.LayerNormalization(scale=False, name="norm")
    model = keras.Sequential([keras.Input((4,)), norm, layers.Dense(4)])
    norm.beta.assign(np.full(4, 1e5))
    return model


def not_homogeneous():
    stack = [big(4, "gelu"), big(4), layers.Activation("tanh")]
    return keras.Sequential([keras.Input((4,)), *stack])


@pytest.mark.one_backend
@pytest.mark.parametrize("build", [without_gain, not_homogeneous])
def test_what_hands_no_factor_on_is_left_as_it_is(build):
    model = build()
    before = model.get_weights()
    assert rescale_weights(model, [ONES]) == {}
    assert_weights(model, before)


@pytest.mark.one_backend
@pytest.mark.filterwarnings("ignore:.*match the names:UserWarning")
def test_inputs_are_known_by_the_names_of_their_dict():
    inputs = {"a": keras.Input((4,), name="one"), "b": keras.Input((4,))}
    x = layers.LayerNormalization()(big()(layers.Add()([*inputs.values()])))
    model = keras.Model(inputs, layers.Dense(1)(x))
    batch = dict.fromkeys(inputs, ONES)
    known = values(model, batch)
    assert rescale_weights(model, [batch])
    np.testing.assert_array_equal(values(model, batch), known)


# Outputs that are clamped.


def gated(activation, unit=5e3, op=None):
    """A unit of a gate reaches 1.2e5: infinite, a softmax of it is NaN."""
    inputs = keras.Input((8,))
    gate = layers.Dense(4, name="gate")(inputs)
    gate = op(gate) if op else gate
    gate = layers.Activation(activation, name="open")(gate)
    x = layers.Multiply()([layers.Dense(4, name="values")(inputs), gate])
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    kernel = RANDOM.normal(size=(8, 4)) / 8
    kernel[:, 0] = unit
    model.get_layer("gate").kernel.assign(kernel)
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("activation", "unit"), [("softmax", 5e3), ("silu", -5e3)]
)
def test_outputs_are_clamped_whose_size_does_not_matter(
    activation, unit, tmp_path
):
    model = gated(activation, unit)
    small, report = converted(model)
    assert report.wide_layers == []
    assert "65504" in report.plan.reasons["gate"]
    assert [r["path"] for r in report.layers if r["clamped"]] == ["gate"]
    exact = model.predict(X, verbose=0)
    y = small.predict(X, verbose=0)
    np.testing.assert_allclose(y, exact, atol=5e-3 * np.abs(exact).max())
    assert_loads_the_same(small, X, tmp_path)


@pytest.mark.one_backend
def test_an_operation_that_is_no_layer_is_clamped():
    model = gated("softmax", 625.0, lambda x: keras.ops.multiply(x, 8))
    _, report = converted(model)
    assert report.wide_layers == []
    assert any("65504" in note for note in report.notes)


@pytest.mark.one_backend
def test_nothing_is_clamped_that_outputs_depend_on():
    _, report = converted(gated("linear"))
    assert report.wide_layers
    assert not any(r["clamped"] for r in report.layers)


@pytest.mark.one_backend
def test_healthy_models_are_left_as_they_are():
    case = CASES["healthy_mlp"]
    _, report = converted(case.model("float32", None), case.data()[0][:64])
    assert not any(r["rescaled_bits"] or r["clamped"] for r in report.layers)
