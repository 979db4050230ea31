"""Networks that are trained, converted, saved, and loaded elsewhere."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.datasets import load_digits

import keras_mixprec as kmp

_LOADED = """
import sys; sys.modules['keras_mixprec'] = None
import keras, numpy as np
data = np.load(sys.argv[1] + "/data.npz")
model = keras.saving.load_model(sys.argv[1] + "/small.keras")
y = model.predict(data["x"], verbose=0)
np.testing.assert_array_equal(y, data["y"])
assert {v.dtype for v in model.weights} == {sys.argv[2]}
"""


def digits():
    """A convolutional network on images, with its data."""
    images, labels = load_digits(return_X_y=True)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    return model, images.reshape(-1, 8, 8, 1).astype("float32"), labels


def transformer():
    """A block of attention that finds out which token is the first."""
    tokens = np.random.default_rng(0).integers(0, 30, (1000, 8))
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(30, 32)(inputs)
    x = layers.LayerNormalization()(
        x + layers.Embedding(8, 32)(_positions(inputs))
    )
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
    y = layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
    x = layers.Flatten()(layers.LayerNormalization()(x + y))
    outputs = layers.Dense(3, activation="softmax")(x)
    return keras.Model(inputs, outputs), tokens, tokens[:, 0] % 3


def _positions(tokens):
    return keras.ops.cumsum(keras.ops.ones_like(tokens), 1) - 1


def trained(build):
    model, x, y = build()
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, epochs=4, verbose=0)
    accuracy = np.mean(model.predict(x, verbose=0).argmax(-1) == y)
    assert accuracy > 0.9
    return model, x


# JAX has no attention in float16 on CPUs.
@pytest.mark.parametrize(
    ("build", "dtype"), [(digits, "float16"), (transformer, "bfloat16")]
)
def test_half_the_size_and_the_same_classes(build, dtype, tmp_path):
    model, x = trained(build)
    small, report = kmp.convert_for_inference(
        model, dtype, calibration=x[:256], batch_size=128
    )
    share = report.size["after"] / report.size["before"]
    assert share == pytest.approx(0.5, rel=0.02)
    assert report.wide_layers in ([], ["rescaling"])
    (drift,) = report.drift
    assert drift["top1_agreement"] >= 0.99, report
    assert 0 < drift["relative"] < 0.01
    small.save(tmp_path / "small.keras")
    y = small.predict(x[:64], verbose=0)
    np.savez(tmp_path / "data.npz", x=x[:64], y=y)
    script = [sys.executable, "-c", _LOADED, str(tmp_path), dtype]
    subprocess.run(script, check=True)
