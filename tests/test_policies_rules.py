"""Rules: what they match, which wins, and that unused ones are reported."""

import json

import keras
import pytest
from keras import layers
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
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, name="wide"),
            layers.ReLU(name="relu"),
            layers.Dense(2, name="head"),
        ]
    )


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        (layers.Dense, {"wide", "head"}),
        (layers.Layer, {"wide", "relu", "head"}),
        ("head", {"head"}),
        ("h*", {"head"}),
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
    plan = apply_policy(model, "float64", rules=rules[bool(unused) :])
    assert {p for p in plan if plan[p] == "float32"} == expected


def test_the_first_match_wins():
    rules = [PrecisionRule("head", "float64"), PrecisionRule(layers.Dense)]
    plan = apply_policy(small_model(), "mixed_bfloat16", rules=rules)
    assert (plan["head"], plan["wide"]) == ("float64", "float32")


def test_a_composite_demotes_its_parts_with_it_unless_asked_not_to():
    attention = layers.MultiHeadAttention
    plan = apply_policy(
        functional(), "mixed_bfloat16", rules=[PrecisionRule(attention)]
    )
    assert plan["multi_head_attention/query"] == "float32"
    alone = [PrecisionRule(attention, sublayers=False)]
    plan = apply_policy(functional(), "mixed_bfloat16", rules=alone)
    assert plan["multi_head_attention"] == "float32"
    assert plan["multi_head_attention/query"] == "mixed_bfloat16"


def test_a_rule_that_matches_nothing_is_reported():
    with pytest.warns(UserWarning, match="'haed'.* matches no layer.*head"):
        apply_policy(
            small_model(), "mixed_bfloat16", rules=[PrecisionRule("haed")]
        )


def test_defaults_and_rules_for_layers_to_come_are_not_reported():
    apply_policy(small_model(), "mixed_bfloat16")
    rules = [PrecisionRule("*/query")]
    apply_policy(Subclassed(), "mixed_bfloat16", rules=rules)


def test_a_wide_policy_needs_no_default_rules():
    plan = apply_policy(small_model(), "float64")
    assert set(plan.values()) == {"float64"}


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: repr(rule))
def test_each_default_rule_has_a_reason(rule):
    assert len(rule.reason) > 20
    assert rule.policy == "float32"


def test_class_and_pattern_rules_survive_their_config():
    rules = PrecisionRules(
        [
            PrecisionRule(layers.Dense, "mixed_bfloat16", "why", False),
            PrecisionRule("*/head"),
            PrecisionRule(Subclassed),
        ]
    )
    config = keras.saving.serialize_keras_object(rules)
    again = keras.saving.deserialize_keras_object(config)
    assert [vars(r) for r in again] == [vars(r) for r in rules]


def test_a_predicate_that_cannot_be_found_again_is_not_saved():
    with pytest.raises(ValueError, match="is_wide cannot be found again"):
        PrecisionRule(is_wide).get_config()


def test_a_registered_predicate_is_saved():
    registered = keras.saving.register_keras_serializable("tests")(
        lambda layer, path: True
    )
    rule = PrecisionRule(registered)
    assert PrecisionRule.from_config(rule.get_config()).match is registered


def test_only_rules_of_ones_own_are_reported_as_unmatched():
    own = PrecisionRule("no such layer")
    with pytest.warns(UserWarning, match="no such layer") as caught:
        apply_policy(
            small_model(), "mixed_bfloat16", rules=[own, *DEFAULT_RULES]
        )
    assert len(caught) == 1


def test_the_default_rules_can_be_saved():
    config = json.loads(json.dumps(DEFAULT_RULES.get_config()))
    again = PrecisionRules.from_config(config)
    assert [r.match for r in again] == [r.match for r in DEFAULT_RULES]
    assert again.get_config() == config
