"""The largest attention logit is measured where a layer computes it."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import JITS
from test_numerics_probe import Probing

from keras_mixprec.numerics.range_reading import read_ranges
from keras_mixprec.policies.layers import walk

JIT = next(iter(JITS))
X = np.random.default_rng(0).normal(size=(8, 5, 6)).astype("float32")
X[3] *= 4.0


class TinyAttention(layers.Layer):
    """As KerasHub's T5 does, with a mask that is added."""

    def call(self, x):
        logits = ops.matmul(x, ops.swapaxes(x, 1, 2))
        mask = -1e9 * (1 - ops.tri(x.shape[1]))
        weights = ops.softmax(logits + ops.cast(mask, x.dtype))
        return ops.matmul(weights, x)


def own(x, layer):
    return np.einsum("bth,bsh->bts", x, x) * np.tri(x.shape[1])


def projected(x, layer):
    def of(dense):
        kernel, bias = (np.array(w, "float64") for w in dense.weights)
        return np.einsum("btf,fnh->btnh", x, kernel) + bias

    query, key = of(layer._query_dense), of(layer._key_dense)
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(4.0)


def attention(dropout):
    return lambda: layers.MultiHeadAttention(2, 4, dropout=dropout)


LAYERS = {
    "fused": (attention(0.0), projected),
    "softmax": (attention(0.1), projected),
    "grouped": (lambda: layers.GroupQueryAttention(4, 4, 2), projected),
    "own": (TinyAttention, own),
}


def model(make):
    inputs = keras.Input((5, 6))
    layer = make()
    own = isinstance(layer, TinyAttention)
    x = layer(inputs) if own else layer(inputs, inputs)
    x = layers.Softmax()(layers.Dense(2)(layers.Flatten()(x)))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse", jit_compile=JIT)
    model.optimizer.build(model.trainable_variables)
    return model, layer


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_that_of_numpy(name):
    make, logits = LAYERS[name]
    built, layer = model(make)
    known = np.abs(logits(X.astype("float64"), layer)).max()
    found = {
        reading.path: reading.parts["attention_logits"].largest
        for reading in read_ranges(built, (X, np.ones((8, 2)))).readings
        if "attention_logits" in reading.parts
    }
    assert list(found) == [walk(built)[0].path]
    assert list(found.values()) == pytest.approx([known], rel=1e-3)


@pytest.mark.parametrize("name", ["fused", "softmax"])
def test_a_probed_step_measures_it_and_changes_nothing(name):
    weights, found = [], []
    for callbacks in ([], [Probing()]):
        keras.utils.set_random_seed(0)
        built, _ = model(LAYERS[name][0])
        data = X, np.ones((8, 2))
        built.fit(*data, 4, 1, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(built.get_weights())
        found += [c.readings() for c in callbacks]
    assert found[0][walk(built)[0].path].parts["attention_logits"].largest > 0
    for plain, probed in zip(*weights, strict=True):
        np.testing.assert_allclose(probed, plain, rtol=2e-6, atol=1e-7)
