"""Rules: their matches, their order, and the faults that defaults prevent."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import BACKEND, rarely
from policies_models import Subclassed, functional

from keras_mixprec import (
    DEFAULT_RULES,
    PrecisionRule,
    PrecisionRules,
    apply_policy,
)


def is_wide(layer, path):
    return getattr(layer, "units", 0) >= 8


def small_model():
    wide, relu = layers.Dense(8, name="wide"), layers.ReLU(name="relu")
    head = layers.Dense(2, name="head")
    return keras.Sequential([keras.Input((4,)), wide, relu, head])


def applied(*rules, policy="mixed_bfloat16", model=None):
    return apply_policy(model or small_model(), policy, rules=[*rules])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("match", "expected"),
    [
        (layers.Dense, {"wide", "head"}),
        (layers.Layer, {"wide", "relu", "head"}),
        ("head", {"head"}),
        ("HEAD*", set()),
        ("[wr]*", {"wide", "relu"}),
        (is_wide, {"wide"}),
        ("<output>", {"head"}),
    ],
)
def test_what_a_rule_matches(match, expected):
    rules = [PrecisionRule(match), PrecisionRule("*", "mixed_bfloat16")]
    model = small_model()
    rules = PrecisionRules(rules)
    unused = {rule.match for rule in rules.unmatched(model)}
    assert unused == (set() if expected else {match})
    # A rule that an earlier one always beats is not unused.
    plan = applied(*rules[bool(unused) :], policy="float64", model=model)
    assert {p for p in plan if plan[p] == "float32"} == expected


@pytest.mark.one_backend
def test_the_first_match_wins_and_a_composite_takes_its_parts_along():
    plan = applied(
        PrecisionRule("head", "float64"), PrecisionRule(layers.Dense)
    )
    assert (plan["head"], plan["wide"]) == ("float64", "float32")
    attention = layers.MultiHeadAttention
    for given, of_query in (
        ({}, "float32"),
        ({"sublayers": False}, "mixed_bfloat16"),
    ):
        plan = applied(PrecisionRule(attention, **given), model=functional())
        assert plan["multi_head_attention"] == "float32"
        assert plan["multi_head_attention/query"] == of_query


@pytest.mark.one_backend
def test_only_rules_of_ones_own_that_match_nothing_are_reported():
    own = PrecisionRule("haed")
    with pytest.warns(UserWarning, match="'haed'.*head") as caught:
        applied(own, *DEFAULT_RULES)
    assert len(caught) == 1
    # A layer to come is not missing.
    applied(PrecisionRule("*/query"), model=Subclassed())
    # A wide policy needs no default rules.
    plan = apply_policy(small_model(), "float64")
    assert set(plan.values()) == {"float64"}


class UserNorm(layers.Layer):
    def call(self, x):
        mean_square = ops.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
        return x / ops.sqrt(mean_square + 1e-6)


def attention(x):
    return layers.Attention()([x, x])


def cosine(x):
    return layers.Dot(axes=1, normalize=True)([x, x])


def operation(name, *arguments):
    function = getattr(ops, name)
    return lambda x: function(layers.Identity()(x), *arguments)


def run(model, value):
    shape = (1, *model.input_shape[1:])
    x = np.full(shape, value, "float32")
    return ops.convert_to_numpy(ops.cast(model(x), "float32"))


def dense_exp(x):
    dense = layers.Dense(1, "exponential", kernel_initializer="ones")
    return dense(x)


UNIT = layers.UnitNormalization
HAZARDS = {
    "user norm": (lambda x: UserNorm()(x), (16,), 400.0),
    "exponential": (dense_exp, (1,), 12.0),
    "Normalization": (layers.Normalization(None, 1e5, 1e10), (1,), 2e5),
    "Rescaling": (layers.Rescaling(1 / 65536), (1,), 65536.0),
    "UnitNormalization": (lambda x: UNIT()(x), (16,), 300.0),
    "Dot": (cosine, (16,), 300.0),
    "Attention": (attention, (4, 64), 40.0),
    "exp": (operation("exp"), (1,), 12.0),
    "log": (operation("log"), (1,), 1e-9),
    "power": (operation("power", 3), (1,), 50.0),
    "square": (operation("square"), (1,), 300.0),
    "reciprocal": (operation("reciprocal"), (1,), 1e-5),
    "rsqrt": (operation("rsqrt"), (1,), 1e-9),
    "sum": (operation("sum", 1), (400,), 300.0),
    "prod": (operation("prod", 1), (4,), 50.0),
    "cumsum": (operation("cumsum", 1), (400,), 300.0),
}
if BACKEND != "torch":  # which takes the norm and averages in float32
    HAZARDS["norm"] = (operation("norm"), (16,), 300.0)
    average = layers.AveragePooling2D(64)
    HAZARDS["wide average"] = (average, (64, 64, 1), 3.0)


# Elsewhere than on torch every third, and those that only they have.
@pytest.mark.parametrize(
    "hazard",
    [h if i % 3 == 0 or i > 15 else rarely(h) for i, h in enumerate(HAZARDS)],
)
def test_the_hazard_is_real_and_the_rule_repairs_it(hazard):
    make, shape, value = HAZARDS[hazard]
    inputs = keras.Input(shape)
    # Not the output, so one rule decides. The cast of the layer behind it is
    # another layer's hazard.
    after = layers.Identity(name="after")
    model = keras.Model(inputs, after(make(inputs)))
    exact = run(model, value)
    apply_policy(model, "mixed_float16", rules=[])
    after.dtype_policy = "float32"
    assert not np.allclose(run(model, value), exact, rtol=0.1)
    plan = apply_policy(model, "mixed_float16")
    after.dtype_policy = "float32"
    assert np.allclose(run(model, value), exact, rtol=0.01)
    assert set(plan.reasons.values()) <= {r.reason for r in DEFAULT_RULES}


LOOKUPS = {
    "Discretization": lambda: layers.Discretization([2048.5, 1e5]),
    "CategoryEncoding": lambda: layers.CategoryEncoding(3000, "one_hot"),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_raw_numbers_that_are_looked_up(name):
    """Lookups and `Hashing` take integers as they are, and need no rule."""
    after = layers.Dense(1, name="after")
    if name == "Discretization":
        after = layers.Embedding(3, 1, name="after")
    inputs = keras.Input((1,), dtype="int32")
    model = keras.Model(inputs, after(LOOKUPS[name]()(inputs)))
    x = np.array([[2047], [2049]], "int32")
    exact = model.predict(x, verbose=0)
    if BACKEND == "tensorflow":
        apply_policy(model, "mixed_float16", rules=[PrecisionRule("after")])
        assert not np.array_equal(model.predict(x, verbose=0), exact)
    plan = apply_policy(model, "mixed_float16")
    np.testing.assert_array_equal(model.predict(x, verbose=0), exact)
    assert any("2049" in reason for reason in plan.reasons.values())


def with_and_without(model):
    """Applies float16 without the default rules, then with them."""
    for rules in ([], None):
        apply_policy(model, "mixed_float16", rules=rules)
        yield


def test_a_rounded_probability_at_the_output():
    model = keras.Sequential([keras.Input((2,)), layers.Softmax()])
    x = np.array([[20.0, 0.0]], "float32")
    exact = ops.convert_to_numpy(model(x))
    found = [ops.convert_to_numpy(model(x)) for _ in with_and_without(model)]
    assert found[0][0, 1] == 0.0
    np.testing.assert_array_equal(found[1], exact)


def test_an_activity_loss():
    regularized = layers.Dense(
        2, kernel_initializer="ones", activity_regularizer="l2"
    )
    model = keras.Sequential([keras.Input((100,)), regularized, layers.ReLU()])
    losses = []
    for _ in with_and_without(model):
        model(np.full((1, 100), 6.0, "float32"))
        losses.append(float(ops.convert_to_numpy(model.losses[0])))
    assert not np.isfinite(losses[0])
    assert losses[1] == pytest.approx(0.01 * 2 * 600**2)


def behind_layers_that_hand_on():
    stack = [layers.Dense(4), layers.Dense(4, name="head"), layers.Flatten()]
    return keras.Sequential([keras.Input((4,)), *stack])


def behind_operations_and_in_nested_models():
    inputs = keras.Input((4,))
    nested = keras.Sequential([layers.Dense(4), layers.Dense(4)])
    outputs = [nested(inputs) * 2, layers.Dense(1, name="b")(inputs)]
    return keras.Model(inputs, outputs)


class Classifier(keras.Model):
    """Its outputs are its softmax layers."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4)
        self.head = layers.Dense(2, activation="softmax")


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("build", "outputs"),
    [
        (behind_layers_that_hand_on, ["head", "flatten"]),
        (behind_operations_and_in_nested_models, ["sequential/dense_1", "b"]),
        (Classifier, ["dense_1"]),
    ],
)
def test_outputs_are_found(build, outputs):
    model = build()
    models = [model]
    if type(model) is keras.Sequential:
        models.append(keras.Model(model.inputs, model.outputs))
    for model in models:
        reasons = apply_policy(model, "mixed_float16").reasons
        reason = DEFAULT_RULES[0].reason
        assert [path for path in reasons if reasons[path] == reason] == outputs


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "layer",
    [
        layers.LayerNormalization(),
        layers.BatchNormalization(),
        layers.MultiHeadAttention(1, 1),
    ],
    ids=lambda layer: layer.name,
)
def test_what_is_fine_is_left_in_16_bits(layer):
    model = keras.Sequential([layer, layers.Dense(1)])
    plan = apply_policy(model, "mixed_float16")
    assert list(plan.values())[0] == "mixed_float16"
