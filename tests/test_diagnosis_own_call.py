"""Faults of a model's own `call`, between its layers."""

import keras
import numpy as np
from keras import layers, ops
from monitor_models import each_jit

import keras_mixprec as kmp

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


class Between(keras.Model):
    """Normalizes by hand what its first layer returns."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8, name="first")
        self.second = layers.Dense(8, name="second")

    def call(self, x):
        x = self.first(x)
        size = ops.sum(ops.square(300 * x), axis=-1, keepdims=True)
        return self.second(300 * x / ops.sqrt(size + 1e-3))


def compiled(model, jit=False):
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    return model


@each_jit
def test_the_code_is_named_and_the_layer_that_it_follows(jit):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    (verdict,) = kmp.diagnose(compiled(Between(), jit), X, X)
    found = verdict.layer, verdict.kind, verdict.direction
    assert found == ("<model>", "forward_overflow", "forward")
    assert verdict.numbers["after"] == ["first"]
    assert "the model's own `call`, after layer 'first'" in verdict.advice
    assert "PrecisionRule('first')" in verdict.advice


def test_that_of_a_model_within_a_model():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8,))
    x = layers.Dense(8)(Between(name="inner")(inputs))
    (verdict,) = kmp.diagnose(compiled(keras.Model(inputs, x)), X, X)
    assert verdict.layer == "inner"
    assert verdict.numbers["after"] == ["inner/first"]
    assert "own `call` of 'inner', after layer 'inner/first'" in verdict.advice


@each_jit
def test_the_tuner_demotes_that_layer(jit, tmp_path):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model = compiled(Between(), jit)
    model.fit(X, X, verbose=0, epochs=4, callbacks=[monitor, tuner])
    wide = [path for path, policy in tuner.plan.items() if policy == "float32"]
    assert wide == ["first"]
    found = monitor.summary.headline
    assert found["state"] == "repaired"
    assert found["text"].startswith("<model> after first overflowed")
