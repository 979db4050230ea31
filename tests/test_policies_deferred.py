"""Sublayers that are made in `build` follow the policy given before."""

import keras
import numpy as np
import pytest
from keras import layers
from policies_models import INPUT, LateBlock, Subclassed

from keras_mixprec import PrecisionPlan, PrecisionRule, apply_policy
from keras_mixprec.policies.layers import may_grow


def test_late_sublayers_follow():
    model = Subclassed()
    apply_policy(model, "mixed_bfloat16", rules=[])
    model(INPUT)
    plan = PrecisionPlan.from_model(model)
    assert set(plan.values()) == {"mixed_bfloat16"}
    assert "late_block/block/dense" in plan


def test_late_sublayers_follow_when_fit_builds_them():
    model = Subclassed()
    apply_policy(model, "mixed_bfloat16", rules=[])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(INPUT, np.ones((2, 5, 2), "float32"), verbose=0)
    plan = PrecisionPlan.from_model(model)
    assert set(plan.values()) == {"mixed_bfloat16"}
    assert "multi_head_attention/query" in plan


def test_late_sublayers_follow_the_rules():
    model = Subclassed()
    rules = [PrecisionRule("*/softmax"), PrecisionRule("late_block/block")]
    apply_policy(model, "mixed_bfloat16", rules=rules)
    model(INPUT)
    plan = PrecisionPlan.from_model(model)
    assert plan["multi_head_attention/softmax"] == "float32"
    assert plan["late_block/block/dense"] == "float32"
    assert plan["late_block/dense"] == "mixed_bfloat16"


def test_a_plan_of_a_built_model_applies_to_an_unbuilt_one():
    built = Subclassed()
    built(INPUT)
    rules = [PrecisionRule("*/softmax")]
    plan = apply_policy(built, "mixed_bfloat16", rules=rules)
    fresh = Subclassed()
    plan.apply(fresh)
    fresh(INPUT)
    assert plan.diff(PrecisionPlan.from_model(fresh)) == []


def test_a_plan_of_an_unbuilt_model_applies_to_a_built_one():
    plan = apply_policy(Subclassed(), "mixed_bfloat16", rules=[])
    built = Subclassed()
    built(INPUT)
    assert set(plan.apply(built).values()) == {"mixed_bfloat16"}


def test_the_last_call_before_build_counts():
    model = Subclassed()
    apply_policy(model, "mixed_float16", rules=[])
    apply_policy(model, "mixed_bfloat16", rules=[])
    model(INPUT)
    plan = PrecisionPlan.from_model(model)
    assert set(plan.values()) == {"mixed_bfloat16"}


def test_build_is_keras_own_again_afterwards():
    model = keras.Sequential([LateBlock(), layers.Dense(1)])
    own = model.layers[0].build
    apply_policy(model, "mixed_bfloat16")
    assert model.layers[0].build is not own
    model.build((None, 4))
    assert model.layers[0].build is own


def test_a_model_that_makes_its_layers_in_build():
    class Late(keras.Model):
        def build(self, shape):
            self.dense = layers.Dense(2)
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    model = Late()
    apply_policy(model, "mixed_bfloat16")
    model(INPUT)
    assert model.dense.compute_dtype == "bfloat16"
    assert model.dense.kernel.dtype == "float32"


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (layers.MultiHeadAttention(1, 1), True),
        (LateBlock(), True),
        (layers.ReLU(), False),
        (keras.Sequential([layers.Dense(1)]), False),
        (Subclassed(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_may_grow(layer, expected):
    assert may_grow(layer) is expected
