"""A fault in a `Sequential` that gets its input layer when it is built."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :1].copy()


def block(*more):
    keras.config.set_dtype_policy("mixed_float16")
    down = layers.Rescaling(1e-3, name="down")
    model = keras.Sequential([down, *more], name="block")
    model.build((None, 4))
    return model


def nested():
    inputs = keras.Input((4,))
    x = layers.Rescaling(1.0, dtype="float32", name="raw")(inputs)
    head = layers.Dense(1, dtype="float32", name="head")
    return keras.Model(inputs, head(block(layers.Dense(4))(x)))


def alone():
    return block(layers.Dense(1, dtype="float32", name="head"))


@pytest.mark.long
@pytest.mark.parametrize("build", [alone, nested])
def test_a_sequential_without_an_input_is_diagnosed_and_repaired(build):
    model = build()
    large = np.full((2, 4), 1e6, "float32")
    # It computes in its policy.
    assert not np.isfinite(model.predict(large, verbose=0)).any()
    wide = build()
    kmp.apply_policy(wide, "float32")
    assert np.isfinite(wide.predict(large, verbose=0)).all()
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(0.05))
    model.compile(optimizer, loss="mse", jit_compile=False)
    before = model.inputs[0].dtype, model.input_dtype
    assert kmp.diagnose(model, 1e5 * X, Y)[0].layer.endswith("down")
    assert (model.inputs[0].dtype, model.input_dtype) == before
    assert build is nested or before == ("float16", "float16")
    tuner = kmp.PrecisionTuner(verbose=0)
    history = model.fit(1e5 * X, Y, 16, 3, verbose=0, callbacks=[tuner]).history
    assert tuner.history[0]["kind"] == "demote"
    assert np.isfinite(history["loss"]).all()
    assert model.optimizer.skipped_steps < 4
