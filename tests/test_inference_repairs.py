"""Layers that stay in 16 bits, with rescaled weights or clamped outputs."""

import keras
import numpy as np
import pytest
from keras import layers
from test_inference_rescale_weights import MODELS
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.inference.clamp_outputs import clamp_outputs

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(1, 3, size=(64, 8)).astype("float32")


def gated(activation, unit=5e3, op=None):
    """A unit of a gate reaches 1.2e5: infinite, a softmax of it is NaN."""
    inputs = keras.Input((8,))
    gate = layers.Dense(4, name="gate")(inputs)
    gate = op(gate) if op else gate
    x = layers.Dense(4, name="values")(inputs)
    gate = layers.Activation(activation, name="open")(gate)
    x = layers.Multiply()([x, gate])
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    kernel = RANDOM.normal(size=(8, 4)) / 8
    kernel[:, 0] = unit
    model.get_layer("gate").kernel.assign(kernel)
    return model


def converted(model, x=X, **kwargs):
    return kmp.convert_for_inference(model, "float16", calibration=x, **kwargs)


def row(report, path):
    (found,) = [row for row in report.layers if row["path"] == path]
    return found


def test_a_sequential_model_is_rescaled_as_well():
    """Made from its config, it has called its layers more than once."""
    dense = [layers.Dense(64, "relu"), layers.Dense(64, name="second")]
    parts = [keras.Input((8,)), *dense, layers.LayerNormalization()]
    model = keras.Sequential(parts)
    for layer in dense:
        layer.kernel.assign(1000.0 * layer.kernel)
    _, report = converted(model)
    assert report.wide_layers == []
    assert row(report, "second")["rescaled_bits"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_rescaled_where_a_layer_would_be_wide(name, tmp_path):
    build, x = MODELS[name]
    model = build()
    before = model.get_weights()
    small, report = converted(model, x)
    wide = ["dense"] if name == "convolutions" else []
    assert set(report.wide_layers) <= set(wide)
    moved = {r["path"]: r["rescaled_bits"] for r in report.layers}
    assert any(moved.values())
    path = next(path for path, bits in moved.items() if bits)
    assert f"2**-{moved[path]}" in report.plan.reasons[path]
    assert row(report, path)["headroom_bits"] >= 2
    assert report.drift[0]["relative"] < 0.01
    for own, known in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, known)
    # A file has the powers of two, and Keras' own layers only.
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    y = small.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), y)


@pytest.mark.parametrize(
    ("activation", "unit"), [("softmax", 5e3), ("silu", -5e3)]
)
def test_outputs_are_clamped_whose_size_does_not_matter(
    activation, unit, tmp_path
):
    model = gated(activation, unit)
    small, report = converted(model)
    assert report.wide_layers == []
    assert row(report, "gate")["clamped"]
    assert "65504" in report.plan.reasons["gate"]
    assert [r["path"] for r in report.layers if r["clamped"]] == ["gate"]
    exact = model.predict(X, verbose=0)
    y = small.predict(X, verbose=0)
    np.testing.assert_allclose(y, exact, atol=5e-3 * np.abs(exact).max())
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), y)


def test_an_operation_that_is_no_layer_is_clamped():
    small, report = converted(
        gated("softmax", 625.0, lambda x: keras.ops.multiply(x, 8))
    )
    assert report.wide_layers == []
    assert any("clamped to 65504" in note for note in report.notes)


def test_nothing_is_clamped_that_outputs_depend_on():
    _, report = converted(gated("linear"))
    assert report.wide_layers
    assert not any(r["clamped"] for r in report.layers)


def test_a_stream_beyond_the_format_takes_few_tries(monkeypatch):
    made, clone = [], keras.models.clone_model
    monkeypatch.setattr(
        keras.models,
        "clone_model",
        lambda *args, **kwargs: made.append(1) or clone(*args, **kwargs),
    )
    inputs = x = keras.Input((4,))
    for _ in range(60):
        x = keras.layers.Add()([x, x * 1e-3])
    model = keras.Model(inputs, x)
    same, clamped = clamp_outputs(model, [np.full((2, 4), 1e5)])
    assert (same, clamped) == (model, [])
    assert len(made) <= 32


def test_healthy_models_are_left_as_they_are():
    (case,) = cases(["healthy_mlp"])
    model = case.model("float32", None)
    x, _ = case.data()
    _, report = converted(model, x[:64])
    assert not any(r["rescaled_bits"] or r["clamped"] for r in report.layers)
