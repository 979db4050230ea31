"""`diagnose` on layers whose results any rounding changes, and no worse."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mixprec as kmp
from keras_mixprec.diagnosis.examination import examine

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 16)).astype("float32")
Y = RANDOM.normal(size=(32, 1)).astype("float32")


def model_of(*middle):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16,))
    for layer in (layers.Dense(16, name="first"), *middle):
        x = layer(x)
    outputs = layers.Dense(1, name="head")(x)
    model = keras.Model(inputs, outputs)
    rules = [kmp.PrecisionRule("head")]
    rules += [kmp.PrecisionRule("wide")] if len(middle) > 1 else []
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    optimizer = kmp.LossScaleOptimizer("adam", initial_scale=2.0**8)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def found(*middle):
    verdicts = kmp.diagnose(model_of(*middle), X, Y)
    return [(v.layer, v.kind, v.direction) for v in verdicts]


class TopOne(layers.Layer):
    """Sends each sample to one of two experts, who are nearly as good."""

    def build(self, input_shape):
        self.gate = self.add_weight(shape=(input_shape[-1], 2))
        column = RANDOM.normal(size=(input_shape[-1], 1))
        off = 1e-3 * RANDOM.normal(size=(input_shape[-1], 2))
        self.gate.assign(column + off)
        self.experts = self.add_weight(shape=(2, input_shape[-1]))

    def call(self, x):
        best = ops.argmax(ops.matmul(x, self.gate), axis=-1)
        return x * ops.take(self.experts, best, axis=0)


class InOrder(TopOne):
    """Mixes samples with the experts in the order of their scores."""

    def scores(self, x):
        return ops.matmul(x, self.gate)

    def call(self, x):
        order = ops.argsort(self.scores(x), axis=-1)
        mixed = ops.take(self.experts, order, axis=0)
        return x * ops.sum(mixed * ops.cast([[[1.0], [0.1]]], x.dtype), axis=1)


class BestOfTwo(InOrder):
    """Mixes them with the better one, as much as it is better."""

    def call(self, x):
        _, best = ops.top_k(self.scores(x), 1)
        return x * ops.take(self.experts, best[:, 0], axis=0)


class Sorted(layers.Layer):
    """Sorts numbers that are nearly alike in pairs."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(16, 16))
        pairs = np.repeat(RANDOM.normal(size=(16, 8)), 2, axis=1)
        self.kernel.assign(pairs * (1 + 1e-4 * RANDOM.normal(size=(16, 16))))

    def call(self, x):
        ranks = ops.cast(ops.arange(1.0, 17.0) / 16, x.dtype)
        return ops.sort(ops.matmul(x, self.kernel), axis=-1) * ranks


class Rounded(layers.Layer):
    """Rounds what lies half-way between two integers."""

    def call(self, x):
        tenths = ops.cast(ops.floor(x * 8), x.dtype) / 10 + 0.05
        return ops.round(tenths * 10) / 10 + 0.1 * x


class ZeroMean(layers.Layer):
    """A mean that is 0 but for rounding."""

    def call(self, x):
        x = x - ops.mean(x, axis=-1, keepdims=True)
        return ops.mean(x, axis=-1, keepdims=True)


class Kink(layers.Layer):
    """A ReLU of what is 0 but for rounding."""

    def call(self, x):
        third = x * ops.cast(1 / 3, x.dtype)
        return x + ops.relu(third + third + third - x)


@pytest.mark.parametrize(
    "layer", [TopOne, InOrder, BestOfTwo, Sorted, Rounded, Kink]
)
def test_a_tie_is_no_fault(layer):
    assert found(layer(name="tie")) == []


@pytest.mark.parametrize(("layer", "seed"), [(BestOfTwo, 11), (InOrder, 4)])
def test_two_scores_that_round_to_the_same_number(layer, seed, monkeypatch):
    # Half an ulp of the weights tells them apart in one of 12 roundings.
    monkeypatch.setitem(globals(), "RANDOM", np.random.default_rng(seed))
    assert found(layer(name="tie")) == []


def test_a_mean_of_zero_is_no_fault():
    normalized = layers.LayerNormalization(name="wide", center=False)
    assert found(normalized, ZeroMean(name="mean")) == []


class AddsNothing(layers.Layer):
    """Adds what is too small to change anything, in float32 as well."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tiny = layers.Rescaling(1e-9, name="tiny")

    def call(self, x):
        return x + self.tiny(x)


def test_an_underflow_that_changes_nothing_is_no_fault():
    assert found(AddsNothing(name="adds")) == []


class Raised(layers.Layer):
    """Returns numbers of about 20,000, between which float16 has few."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(16, name="dense")

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return 20000.0 + ops.cast(self.dense(x), self.compute_dtype)


def test_only_what_is_needed_inside_a_layer_is_demoted():
    lowered = layers.Rescaling(1.0, -20000.0, name="wide")
    model = model_of(Raised(name="raised"), lowered)
    [finding] = examine(model, X, Y).findings
    assert finding.verdict.layer == "raised"
    assert [layer.name for layer in finding.layers] == ["raised"]


class Waves(layers.Layer):
    def call(self, x):
        return x + ops.sin(1e6 * x)


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_float32_does_not_settle_blames_none(seed):
    """Of deep models that normalize over four samples it is as chaotic."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    ends = [Waves(dtype="float32"), layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), *ends])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(4, 4)), random.normal(size=(4, 1))
    assert [v for v in kmp.diagnose(model, x, y) if v.layer] == []


def test_what_rounding_the_data_has_left_of_a_mean_is_no_fault():
    """As of series that were made to have a mean of 0, in float32."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    pool, hidden = layers.GlobalAveragePooling1D(), layers.Dense(16)
    model = keras.Sequential(
        [keras.Input((120, 1)), pool, hidden, layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(epsilon=1e-12))
    model.compile(optimizer, loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(32, 120, 1))
    x = (x - x.mean(axis=1, keepdims=True)).astype("float32")
    found = kmp.diagnose(model, x, np.arange(32) % 2)
    assert [v.layer for v in found if v.layer] == []
