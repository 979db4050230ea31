"""Weights that 16 bits do not hold, and what overflows in known networks."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")


def found(verdicts):
    return {v.layer: v.kind for v in verdicts}


def in_float16(*parts, wide=()):
    model = keras.Sequential([keras.Input((8,)), *parts])
    rules = [kmp.PrecisionRule(name) for name in wide]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    return model


def with_kernel(name, change, scale=1e-4):
    dense = layers.Dense(8, name=name)
    model = in_float16(
        dense, layers.Rescaling(scale, name="next"), wide=["next"]
    )
    dense.kernel.assign(change(ops.convert_to_numpy(dense.kernel).copy()))
    return model


def one_of(value):
    def change(kernel):
        kernel[3, 5] = value
        return kernel

    return change


def test_a_weight_that_overflows_in_its_cast():
    model = with_kernel("big", one_of(1e5))
    (verdict,) = kmp.diagnose(model, X)
    assert found([verdict]) == {"big": "weight_overflow"}
    expected = {"variable": "kernel", "largest_weight": 1e5}
    assert verdict.numbers == expected | {"weights": 1, "of": 64}
    assert "65504" in verdict.advice
    model.compile("sgd", "mse", jit_compile=False)
    assert found(kmp.diagnose(model, X, X))["big"] == "weight_overflow"


def test_whatever_the_model_is_given():
    words = layers.Embedding(10, 8, name="words")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), words])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    table = np.ones((10, 8))
    table[9] = 7e4
    words.embeddings.assign(table)
    (verdict,) = kmp.diagnose(model, np.arange(6).reshape(2, 3))
    assert found([verdict]) == {"words": "weight_overflow"}
    assert verdict.numbers["weights"] == 8


@pytest.mark.parametrize("value", [65504.0, -65519.0, 1e-12])
def test_a_weight_that_fits_or_that_does_not_matter(value):
    model = with_kernel("dense", one_of(value))
    assert kmp.diagnose(model, 0.1 * X) == []


def test_weights_that_vanish_in_their_cast():
    model = with_kernel("small", lambda kernel: 1e-8 * kernel, 1e8)
    before = ops.convert_to_numpy(model.weights[0])
    (verdict,) = kmp.diagnose(model, X)
    assert found([verdict]) == {"small": "weight_underflow"}
    np.testing.assert_array_equal(model.weights[0], before)
    assert verdict.numbers["variable"] == "kernel"
    assert verdict.numbers["weights"] > 32
    assert verdict.numbers["largest_weight"] < 2**-25


def test_those_that_vanish_beside_larger_ones_do_no_harm():
    kept = RANDOM.uniform(size=(8, 8)) < 0.5
    model = with_kernel(
        "dense", lambda kernel: kernel * np.where(kept, 1, 1e-9)
    )
    assert kmp.diagnose(model, X) == []


class Bias(layers.Layer):
    def build(self, shape):
        mask = np.where(np.arange(8) % 2, -1e9, 0.0)
        self.mask = self.add_weight(shape=(8,), name="mask", trainable=False)
        self.mask.assign(mask)

    def call(self, x):
        return ops.softmax(x + self.mask)


def test_a_mask_that_is_a_weight():
    assert kmp.diagnose(in_float16(Bias(name="bias")), X) == []


def test_the_cell_of_a_recurrent_layer():
    lstm = layers.LSTM(4, name="lstm")
    model = in_float16(layers.Reshape((4, 2)), lstm)
    lstm.cell.kernel.assign(np.full((2, 16), 1e5))
    assert found(kmp.diagnose(model, X)) == {"lstm": "weight_overflow"}


# Networks that are known to overflow.


def test_the_feed_forward_of_a_t5():
    """It stays in the residual stream: whatever takes that in is too narrow."""
    inputs = x = keras.Input((8,))
    for block in range(2):
        hidden = layers.UnitNormalization(name=f"unit_{block}")(x)
        hidden = layers.Dense(32, "relu", name=f"inner_{block}")(hidden)
        hidden = layers.Dense(8, name=f"outer_{block}")(hidden)
        x = layers.Add(name=f"sum_{block}")([x, hidden])
    model = keras.Model(inputs, x)
    kernels = [model.get_layer(f"{n}_0").kernel for n in ("inner", "outer")]
    for kernel, factor in zip(kernels, (10, 1.6e5), strict=True):
        kernel.assign(factor * kernel)
    inner, outer = (ops.convert_to_numpy(k).astype("float64") for k in kernels)
    unit = X / np.linalg.norm(X.astype("float64"), axis=1, keepdims=True)
    assert np.abs(np.maximum(unit @ inner, 0) @ outer).max() > 65504
    assert np.abs(outer).max() < 65504
    kmp.apply_policy(model, "mixed_float16", rules=[])
    narrow = dict.fromkeys(["sum_0", "unit_1", "sum_1"], "cast_overflow")
    expected = {"outer_0": "forward_overflow"} | narrow
    assert found(kmp.diagnose(model, X)) == expected


def test_the_decoder_of_an_autoencoder():
    up = [
        layers.Conv2DTranspose(
            8, 3, 2, "same", activation=activation, name=name
        )
        for name, activation in (("up_1", "relu"), ("up_2", None))
    ]
    first = [layers.Dense(128, "relu", name="first"), layers.Reshape((4, 4, 8))]
    last = layers.Conv2D(3, 3, padding="same", activation="tanh", name="last")
    model = in_float16(*first, *up, last, wide=["last"])
    assert kmp.diagnose(model, X) == []
    first[0].kernel.assign(300 * first[0].kernel)
    up[0].kernel.assign(1e4 * up[0].kernel)
    expected = {"up_1": "forward_overflow", "up_2": "cast_overflow"}
    assert found(kmp.diagnose(model, X)) == expected
