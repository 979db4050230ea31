"""Constants that a layer made in its compute dtype when it was built."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import BACKEND

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(1e3, 6e3, size=(64, 1)).astype("float32")
Y = (X - 3e3) / 1e3


class PerUnit(layers.Layer):
    """Divides by a constant of its compute dtype."""

    def build(self, shape):
        self.unit = ops.cast(ops.convert_to_tensor(1e5), self.compute_dtype)

    def call(self, x):
        unit = ops.cast(self.unit, x.dtype)
        return x / unit - unit / unit


def given():
    """Its variance, of about 2e6, is infinite in float16."""
    return layers.Normalization(mean=[3e3], variance=[2e6], name="norm")


def adapted():
    layer = layers.Normalization(name="norm")
    layer.adapt(X)
    return layer


def trained_by(layer):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((1,))
    hidden = layers.Dense(8, activation="tanh")(layer()(inputs))
    outputs = layers.Dense(1, dtype="float32")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse", jit_compile=BACKEND == "jax")
    return model


def normalized(model):
    layer = model.get_layer("norm")
    return ops.convert_to_numpy(layer(X)).astype("float64")


@pytest.mark.parametrize("layer", [given, adapted])
def test_statistics_follow_the_policy(layer):
    model = trained_by(layer)
    assert (normalized(model) == 0).all()
    before = normalized(model)
    assert [v.layer for v in kmp.diagnose(model, X, Y)] == ["norm"]
    np.testing.assert_array_equal(normalized(model), before)

    kmp.apply_policy(model, "mixed_float16")
    assert model.get_layer("norm").compute_dtype == "float32"
    mean, variance = (3e3, 2e6) if layer is given else (X.mean(), X.var())
    exact = (X.astype("float64") - mean) / np.sqrt(variance)
    # A few roundings of float32, of numbers up to 6e3 before the division.
    np.testing.assert_allclose(normalized(model), exact, atol=1e-5)


@pytest.mark.parametrize("layer", [given, adapted])
def test_the_tuner_repairs_them(layer, tmp_path):
    model = trained_by(layer)
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[tuner])
    assert [*tuner.plan.reasons] == ["norm"]
    assert np.ptp(normalized(model)) > 1


def test_a_constant_that_is_lost_for_good_is_named():
    model = trained_by(PerUnit)
    (verdict,) = kmp.diagnose(model, X, Y)
    assert (verdict.kind, verdict.layer) == ("forward_overflow", "per_unit")
    assert verdict.numbers["lost_constant"] == "unit"
