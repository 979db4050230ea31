"""Code of the user's own that mixes dtypes, and what goes on around it."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_mixprec import (
    LossScaleOptimizer,
    MixPrecMonitor,
    PrecisionTuner,
    apply_policy,
    diagnose,
)

BACKEND = keras.backend.backend()
X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
tensorflow_only = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="others promote dtypes"
)


def product(y, prediction):
    return ops.mean(tf_multiply(y, prediction))


def tf_multiply(a, b):
    import tensorflow as tf

    return tf.multiply(a, b)


def casting_loss(y, prediction):
    return product(y, ops.cast(prediction, "float16"))


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return product(y, y_pred)


class OwnCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, name="hidden")
        self.out = keras.layers.Dense(1, name="out")

    def call(self, x):
        ones = ops.ones((4,), "float32")
        return self.out(tf_multiply(self.hidden(x), ones))


def build(where):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1, name="out")(inputs)
    model = OwnCall() if where == "call" else keras.Model(inputs, outputs)
    if where == "compute_loss":
        model = OwnLoss(inputs, outputs)
    loss = casting_loss if where == "loss" else "mse"
    metrics = [product] if where == "metric" else []
    model.compile("adam", loss, metrics=metrics, jit_compile=False)
    return model


@tensorflow_only
@pytest.mark.parametrize("where", ["metric", "call", "compute_loss", "loss"])
def test_the_line_and_its_dtypes_are_named(tmp_path, where):
    (verdict,) = diagnose(build(where), X, Y)
    assert verdict.kind == "unsupported"
    assert sorted(verdict.numbers["mixed_dtypes"]) == ["float16", "float32"]
    assert verdict.numbers["line"].startswith("test_diagnosis_mixed_code.py:")
    layer = {"call": "hidden", "loss": None}.get(where, "out")
    assert verdict.layer == layer

    # Below the exception of `fit`, and after it.
    model = build(where)
    with pytest.raises(TypeError) as raised:
        model.fit(X, Y, verbose=0, callbacks=[MixPrecMonitor(tmp_path)])
    assert "test_diagnosis_mixed_code.py:" in raised.value.__notes__[0]
    assert [v.kind for v in diagnose(model, X, Y)] == ["unsupported"]


class Square(keras.layers.Layer):
    def call(self, x):
        return x * x


@tensorflow_only
def test_checks_of_numerics_are_no_fault_of_a_layer():
    import tensorflow as tf

    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    h = Square(name="square")(inputs)
    head = keras.layers.Dense(1, dtype="float32")
    model = keras.Model(inputs, head(h))
    model.compile("adam", "mse", jit_compile=False)
    tf.debugging.enable_check_numerics()
    try:
        found = [(v.kind, v.layer) for v in diagnose(model, 1e3 * X, Y)]
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.constant(1.0) / 0.0
    finally:
        tf.debugging.disable_check_numerics()
    assert found == [("forward_overflow", "square")]


def test_callbacks_run_in_a_loop_around_a_model_without_compile(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    apply_policy(model, "mixed_float16", rules=[])
    optimizer = LossScaleOptimizer("adam")
    optimizer.build(model.trainable_variables)
    gradients = [ops.ones(v.shape) for v in model.trainable_variables]
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    callbacks = keras.callbacks.CallbackList(
        [monitor, PrecisionTuner(verbose=0)], model=model
    )
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for step in range(3):
            callbacks.on_train_batch_begin(step)
            optimizer.apply(gradients, model.trainable_variables)
            callbacks.on_train_batch_end(step, {"loss": 1.0})
        callbacks.on_epoch_end(epoch, {"loss": 1.0})
    callbacks.on_train_end()
    assert "Steps: 6" in str(monitor.report)
    assert monitor.verdicts == []
