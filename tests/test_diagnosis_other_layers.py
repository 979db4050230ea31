"""Layers that a step calls in 16 bits and that the model does not hold."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import each_jit, monitor
from tuner_models import tuner

import keras_mixprec as kmp

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


class Direction(layers.Layer):
    """x / |x|, whose sum of squares overflows for numbers above 128."""

    def call(self, x):
        squares = ops.sum(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(squares + 1e-6)


class FeatureLoss(keras.losses.Loss):
    """With a network of its own, made under the global policy."""

    def __init__(self, dtype=None):
        super().__init__()
        square = layers.Lambda(ops.square, name="square", dtype=dtype)
        self.net = keras.Sequential([keras.Input((4,)), square], name="net")

    def call(self, y_true, y_pred):
        off = self.net(y_true) - self.net(y_pred)
        return ops.mean(ops.cast(off, "float32") ** 2, axis=-1) / 1e9


class Calls(keras.Model):
    """Calls a layer that it does not know of."""

    def __init__(self, beside):
        super().__init__()
        self.head = layers.Dense(2, dtype="float32")
        self.beside = [lambda x: beside(x)]

    def call(self, x):
        return self.head(self.beside[0](x))


def of_loss(jit, **arguments):
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    dense = layers.Dense(4, name="dense", dtype="float32")
    model = keras.Sequential([keras.Input((4,)), dense])
    loss = FeatureLoss(**arguments)
    model.compile(kmp.LossScaleOptimizer("adam"), loss, jit_compile=jit)
    return model


def of_call(jit, **arguments):
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = Calls(Direction(name="direction", **arguments))
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    return model


def found(model, x, y):
    return [v for v in kmp.diagnose(model, x, y) if v.kind != "scale_search"]


@each_jit
def test_the_network_of_a_loss(jit):
    (verdict,) = found(of_loss(jit), X, 1000 + X)
    assert (verdict.kind, verdict.layer) == ("forward_overflow", None)
    assert "is not part of the model. Make it with dtype" in verdict.advice
    assert "in float16" in verdict.advice


@each_jit
def test_a_layer_that_is_a_global(jit):
    (verdict,) = found(of_call(jit), 600 * X, X[:, :2])
    assert (verdict.kind, verdict.layer) == ("precision_loss", None)
    assert "Layer 'direction'" in verdict.advice


@each_jit
@pytest.mark.parametrize("build", [of_loss, of_call])
def test_a_sound_one_is_not_blamed(build, jit):
    y = X if build is of_loss else X[:, :2]
    assert not found(build(jit), X, y)
    assert not found(build(jit, dtype="float32"), 600 * X, 300 + y)


@each_jit
def test_it_is_told_in_training(jit, tmp_path):
    watcher = monitor(tmp_path)
    model = of_loss(jit)
    model.fit(X, 1000 + X, 4, epochs=3, verbose=0, callbacks=[watcher, tuner()])
    kinds = [(v.kind, v.layer) for v in watcher.verdicts]
    assert ("forward_overflow", None) in kinds
    assert "divergence" not in dict(kinds)


@each_jit
@pytest.mark.parametrize("by_floatx", [True, False])
def test_a_loss_in_float16(jit, by_floatx):
    try:
        keras.config.set_floatx("float16" if by_floatx else "float32")
        keras.config.set_dtype_policy("mixed_float16")
        head = layers.Dense(1, name="head", dtype="float32")
        model = keras.Sequential([keras.Input((4,), dtype="float32"), head])
        dtype = None if by_floatx else "float16"
        loss = keras.losses.MeanSquaredError(dtype=dtype)
        model.compile(kmp.LossScaleOptimizer("sgd"), loss, jit_compile=jit)
        (verdict,) = found(model, X, np.full((16, 1), 400.0, "float32"))
        now = keras.config.floatx(), loss.dtype
    finally:
        keras.config.set_floatx("float32")
    assert (verdict.kind, verdict.layer) == ("forward_overflow", None)
    assert "set_floatx('float32')" in verdict.advice
    assert now == ("float16" if by_floatx else "float32", "float16")
