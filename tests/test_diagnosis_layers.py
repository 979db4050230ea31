"""Faults within layers, and healthy layers that look like faults."""

import keras
import numpy as np
import pytest
from diagnosis_models import LOGITS, Own, blamed, compiled, found, model_of
from keras import layers, ops
from monitor_models import each_jit, only_torch
from zoo.parts import dense, plus

import keras_mixprec as kmp
from keras_mixprec.diagnosis.call_examination import CallRun
from keras_mixprec.diagnosis.examination import examine
from keras_mixprec.diagnosis.step_search import StepRun

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 16)).astype("float32")
Y = RANDOM.normal(size=(32, 1)).astype("float32")
HEAD = dense(1, name="head")


def with_head(*parts, wide=(), jit=False, **arguments):
    """A model of layers between two dense ones, the last one in float32."""
    first = dense(16, name="first")
    arguments = {"shape": (16,)} | arguments
    model = model_of(first, *parts, HEAD, wide=("head", *wide), **arguments)
    return compiled(model, jit=jit, initial_scale=2.0**8)


# Faults: the layers in a row, the size of the input, and what is found.


def inverse(x):
    squares = ops.sum(ops.square(x * 1e4), axis=-1, keepdims=True)
    return 1e-8 / (1.0 / squares) + x * 1e-9


FAULTS = {
    "1 over inverse": (
        lambda: [Own(inverse)],
        1.0,
        [("own", "forward_overflow")],
    ),
    # A neighbour is named only if it cannot take large inputs.
    "before a normalization": (
        lambda: [layers.Rescaling(1e6, name="up"), layers.LayerNormalization()],
        1.0,
        [("up", "forward_overflow")],
    ),
    "before its inverse": (
        lambda: [
            layers.Rescaling(1e6, name="up"),
            layers.Rescaling(1e-6, name="down"),
        ],
        1.0,
        [("up", "forward_overflow"), ("down", "cast_overflow")],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    parts, size, expected = FAULTS[name]
    assert found(with_head(*parts()), size * X, Y) == expected


def test_an_overflow_that_no_weight_comes_before_is_found():
    # No gradient says whether the loss depends on it.
    parts = [
        layers.Rescaling(s, name=n) for s, n in ((1e5, "up"), (1e-5, "dn"))
    ]
    model = compiled(model_of(*parts, HEAD, shape=(16,)))
    assert found(model, np.full_like(X, 10.0), Y)[0] == (
        "up",
        "forward_overflow",
    )


def softmax(x):
    terms = ops.exp(x)
    return terms / ops.sum(terms, axis=-1, keepdims=True)


def of_norm_one(x):
    return x * ops.rsqrt(ops.sum(x * x, axis=-1, keepdims=True))


@pytest.mark.parametrize(
    "function",
    [
        # XLA takes a subnormal divisor for 0.
        lambda x: softmax(x * 0.1 - 14.0),
        lambda x: of_norm_one(x * 1e-5),
    ],
    ids=["subnormal", "norm"],
)
def test_a_divisor_that_vanishes_is_an_underflow(function):
    verdicts = kmp.diagnose(with_head(Own(function)), X, Y)
    assert "forward_overflow" not in {verdict.kind for verdict in verdicts}
    for verdict in verdicts:
        if verdict.kind == "underflow":
            assert verdict.numbers["smallest_inside_in_float32"] < 2.0**-14


class HandsOn(layers.Layer):
    """Returns the overflow of the layer inside it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.large = layers.Rescaling(1e5, name="large")
        self.dense = layers.Dense(8, name="dense")

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x), self.large(x)


@each_jit
def test_a_layer_enclosing_a_repaired_one_is_not_blamed(jit):
    def together(parts):
        x, large = parts
        small = layers.Rescaling(1e-5, name="small")(large)
        return layers.Add(name="add")([x, small])

    parts = dense(8, name="first"), HandsOn(name="around"), lambda: together
    wide = "small", "add", "head"
    model = model_of(*parts, HEAD, shape=(16,), wide=wide)
    named = found(compiled(model, jit=jit), X, Y)
    assert named == [("around/large", "forward_overflow")]


def centred(in_place):
    def call(x):
        mean = ops.mean(x, axis=-1, keepdims=True)
        if in_place:
            x -= mean
        else:
            x = x - mean
        return x * x

    return call


@only_torch
@pytest.mark.parametrize("size", [1.0, 400.0])
def test_a_layer_may_change_its_input_in_place(size):
    models = [with_head(Own(centred(way))) for way in (False, True)]
    one, other = (found(model, size * X, Y) for model in models)
    assert one == other
    assert bool(one) == (size > 1)


class Ratio(layers.Layer):
    """Casts the input itself, after making it small."""

    def call(self, x):
        small = ops.cast(x * 1e-14, self.compute_dtype)
        return small / ops.sum(small, axis=-1, keepdims=True)


def test_no_cast_is_blamed_of_a_layer_that_casts_nothing():
    own = Ratio(name="own", autocast=False, dtype="mixed_float16")
    model = compiled(model_of(own, HEAD, policy="float32", shape=(16,)))
    named = found(model, np.full((8, 16), 1e5), np.ones((8, 1)))
    assert named == [("own", "underflow")]


def test_a_healthy_layer_runs_no_more_often_than_the_steps():
    class Counted(layers.Dense):
        calls = 0

        def call(self, inputs):
            self.calls += 1
            return super().call(inputs)

    counted = Counted(16, name="counted")
    model = with_head(counted, jit=True)
    counted.calls = 0
    assert found(model, X, Y) == []
    # Once to find shapes, at two loss scales in float32, once in float16.
    assert counted.calls <= 4


# Many layers at fault, one after the other, take few runs of the step.

LENGTH = 12


def vanishing(name):
    """1e-9 is 0 in float16, and the next layers get zeros."""
    return Own(lambda x: 1e9 * (1e-9 * x), name=name)


def alone(number):
    return vanishing(f"link{number}")


@pytest.mark.long
@pytest.mark.parametrize("target", ["step", "call"])
def test_a_chain_takes_few_runs(target, monkeypatch):
    runs = []
    owner = StepRun if target == "step" else CallRun
    original = owner.take

    def counting(run, **how):
        runs.append(run)
        return original(run, **how)

    monkeypatch.setattr(owner, "take", counting)
    between = dense(16, kernel_initializer="orthogonal")
    parts = [part for n in range(LENGTH) for part in (alone(n), between)]
    model = compiled(model_of(*parts, HEAD, shape=(16,), wide=["head"]))
    named = found(model, X, *[Y] * (target == "step"))
    assert named == [(f"link{n}", "underflow") for n in range(LENGTH)]
    # Some to find all of them, a few each to see that it is needed.
    assert len(runs) <= 4 * LENGTH


# Results that any rounding changes, and no worse.


def experts(mix, seed=0):
    """Two experts, whose scores are nearly the same for each sample."""
    random = np.random.default_rng(seed)
    column = random.normal(size=(16, 1))
    gate = column + 1e-3 * random.normal(size=(16, 2))
    weights = gate, random.normal(size=(2, 16))

    def call(x, gate, experts):
        return x * mix(ops.matmul(x, gate), experts)

    return Own(call, *weights)


def top_one(scores, experts):
    return ops.take(experts, ops.argmax(scores, axis=-1), axis=0)


def in_order(scores, experts):
    mixed = ops.take(experts, ops.argsort(scores, axis=-1), axis=0)
    return ops.sum(mixed * ops.cast([[[1.0], [0.1]]], mixed.dtype), axis=1)


def kink(x):
    """A ReLU of what is 0 but for rounding."""
    third = x * ops.cast(1 / 3, x.dtype)
    return x + ops.relu(third + third + third - x)


def zero_mean(x):
    x = x - ops.mean(x, axis=-1, keepdims=True)
    return ops.mean(x, axis=-1, keepdims=True)


TIES = {
    "one of two": lambda: [experts(top_one)],
    "in order": lambda: [experts(in_order)],
    # Half an ulp of the weights tells them apart in one of 12 roundings.
    "equal, in order": lambda: [experts(in_order, 4)],
    "kink": lambda: [Own(kink)],
    "mean of 0": lambda: [
        layers.LayerNormalization(name="wide", center=False),
        Own(zero_mean),
    ],
    # An underflow that changes nothing, in float32 either.
    "adds nothing": lambda: [plus(layers.Rescaling(1e-9))],
}


@pytest.mark.long
@pytest.mark.parametrize("name", TIES)
def test_a_tie_is_no_fault(name):
    wide = ["wide"] if name == "mean of 0" else []
    assert found(with_head(*TIES[name](), wide=wide), X, Y) == []


class Raised(layers.Layer):
    """Returns numbers of about 20,000, between which float16 has few."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(16, name="dense")

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return 20000.0 + ops.cast(self.dense(x), self.compute_dtype)


@pytest.mark.long
def test_only_what_is_needed_inside_a_layer_is_demoted():
    lowered = layers.Rescaling(1.0, -20000.0, name="lowered")
    model = with_head(Raised(name="raised"), lowered, wide=["lowered"])
    [finding] = examine(model, X, Y).findings
    assert finding.verdict.layer == "raised"
    assert [layer.name for layer in finding.layers] == ["raised"]


def unresolved(seed):
    """Normalized over four samples again and again: any rounding decides."""
    block = dense(16, use_bias=False), layers.BatchNormalization, layers.ReLU
    wide = layers.BatchNormalization, layers.ReLU
    return model_of(*block * 24, dense(1), shape=(4,), wide=wide, seed=seed)


def wavy(seed):
    waves = Own(lambda x: x + ops.sin(1e6 * x), dtype="float32")
    parts = dense(4), waves, dense(1, dtype="float32")
    return model_of(*parts, shape=(4,), policy="mixed_float16", seed=seed)


@pytest.mark.long
@pytest.mark.parametrize(("build", "seed"), [(unresolved, 0), (wavy, 0)])
def test_a_loss_that_float32_does_not_settle_blames_none(build, seed):
    model = compiled(build(seed), optimizer="sgd")
    random = np.random.default_rng(seed)
    data = random.normal(size=(4, 4)), random.normal(size=(4, 1))
    assert blamed(model, *data) == []


@pytest.mark.long
def test_what_rounding_the_data_has_left_of_a_mean_is_no_fault():
    """As of series that were made to have a mean of 0, in float32."""
    parts = layers.GlobalAveragePooling1D, dense(16), dense(2)
    model = model_of(*parts, shape=(120, 1), policy="mixed_float16")
    compiled(model, LOGITS, keras.optimizers.Adam(epsilon=1e-12))
    x = np.random.default_rng(0).normal(size=(32, 120, 1))
    x = (x - x.mean(axis=1, keepdims=True)).astype("float32")
    assert blamed(model, x, np.arange(32) % 2) == []
