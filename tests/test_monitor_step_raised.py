"""Steps that raise, which ends `fit`: on torch a loss may refuse a NaN."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 16)).astype("float32")
Y = RANDOM.integers(0, 2, (96, 1))
# Nothing but zeros in the second batch, for which 1e-8 is 0 in float16.
X[40:44] = 0


class Norm(layers.Layer):
    def call(self, x):
        squares = ops.mean(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(squares + 1e-8)


class Refusing(layers.Layer):
    """Raises whatever the dtype, from its third call on."""

    error, calls = RuntimeError("only twice"), 0

    def call(self, x):
        self.calls += 1
        if self.calls > 2 and x.device.type != "meta":
            raise self.error
        return x


def model_with(layer):
    inputs = keras.Input((16,))
    x = layers.Dense(16, use_bias=False, name="first")(inputs)
    outputs = layers.Dense(1, "sigmoid", name="out")(layer(x))
    model = keras.Model(inputs, outputs)
    rules = [kmp.PrecisionRule("out")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    optimizer = kmp.LossScaleOptimizer("sgd")
    model.compile(optimizer, "binary_crossentropy", jit_compile=False)
    return model


def run(layer, tmp_path, error=RuntimeError):
    """The exception that ended `fit`, and what the report says of the run."""
    model = model_with(layer)
    # A reading before would have diagnosed as well.
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0, update_freq=100)
    settings = {"batch_size": 32, "shuffle": False, "verbose": 0}
    with pytest.raises(error) as caught:
        model.fit(X, Y, callbacks=[watcher], **settings)
    [read] = kmp.load_report(tmp_path).to_dict().values()
    return caught.value, read["headline"]


def test_the_layer_is_named_below_the_exception(tmp_path):
    error, headline = run(Norm(name="norm"), tmp_path)
    [note] = error.__notes__
    assert "underflow in 'norm', forward" in note
    assert "float32: PrecisionRule('norm')" in note
    assert headline["state"] == "failing"
    assert headline["text"].startswith("norm underflowed")
    assert "step 2 raised RuntimeError: all elements of" in headline["text"]
    assert "1 step," in headline["text"]


def test_what_raises_in_float32_too_is_passed_on_as_it_is(tmp_path):
    error, headline = run(Refusing(), tmp_path)
    assert "only twice" in str(error)
    assert not hasattr(error, "__notes__")
    assert " raised RuntimeError" in headline["text"]


def test_a_model_can_be_trained_again_afterwards(tmp_path):
    model = model_with(Norm(name="norm"))
    for folder in "ab":
        watcher = kmp.MixPrecMonitor(tmp_path / folder, verbose=0)
        with pytest.raises(RuntimeError, match="between 0 and 1") as caught:
            model.fit(X, Y, callbacks=[watcher], verbose=0)
        assert "norm" in caught.value.__notes__[0]


def test_nothing_is_diagnosed_without_memory_for_it(tmp_path):
    class Full(Refusing):
        error = torch.OutOfMemoryError("CUDA out of memory")

    error, _ = run(Full(), tmp_path, torch.OutOfMemoryError)
    assert not hasattr(error, "__notes__")
