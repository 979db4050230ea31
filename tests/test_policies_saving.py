"""What a saved model keeps, and that the plan restores the rest."""

import keras
import pytest
from keras import layers
from policies_models import BUILDERS, INPUT, functional, recurrent

from keras_mixprec import PrecisionPlan, PrecisionRule, apply_policy


def reload(model, tmp_path, global_policy):
    model.save(tmp_path / "m.keras")
    keras.config.set_dtype_policy(global_policy)
    return keras.models.load_model(tmp_path / "m.keras")


@pytest.mark.parametrize("global_policy", ["float32", "mixed_float16"])
def test_layers_of_keras_keep_their_dtypes(tmp_path, global_policy):
    inputs = keras.Input((5, 4))
    x = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(2))(layers.Add()([x, inputs]))
    model = keras.Model(inputs, layers.Dense(2)(x))
    plan = apply_policy(model, "mixed_bfloat16")
    loaded = PrecisionPlan.from_model(reload(model, tmp_path, global_policy))
    # The model's own policy is not saved, and computes nothing here.
    assert {change.path for change in plan.diff(loaded)} == {"<model>"}


@pytest.mark.parametrize("build", BUILDERS)
def test_the_plan_restores_what_keras_loses(build, tmp_path):
    model = build()
    plan = apply_policy(model, "mixed_bfloat16")
    loaded = reload(model, tmp_path, "mixed_float16")
    lost = plan.diff(PrecisionPlan.from_model(loaded))
    assert any("block" in change.path for change in lost)
    plan.apply(loaded)
    assert plan.diff(PrecisionPlan.from_model(loaded)) == []
    first, second = (
        keras.ops.cast(m(INPUT), "float32") for m in (model, loaded)
    )
    assert keras.ops.convert_to_numpy(first == second).all()


def test_parts_of_attention_need_the_plan(tmp_path):
    model = functional()
    rules = [PrecisionRule("*/softmax")]
    plan = apply_policy(model, "mixed_bfloat16", rules=rules)
    loaded = reload(model, tmp_path, "float32")
    lost = [c.path for c in plan.diff(PrecisionPlan.from_model(loaded))]
    assert "multi_head_attention/softmax" in lost
    assert plan.apply(loaded).diff(plan) == []


def test_a_saved_plan_applies_to_a_fresh_model(tmp_path):
    plan = apply_policy(recurrent(), "mixed_bfloat16")
    plan.save(tmp_path / "plan.json")
    keras.backend.clear_session()
    fresh = recurrent()
    PrecisionPlan.load(tmp_path / "plan.json").apply(fresh)
    assert plan.diff(PrecisionPlan.from_model(fresh)) == []


def test_stale_symbolic_dtypes_do_not_reach_the_file(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    apply_policy(model, "mixed_float16", rules=[])
    assert model.outputs[0].dtype == "float32"
    loaded = reload(model, tmp_path, "float32")
    assert loaded.outputs[0].dtype == "float16"
    assert loaded.layers[0].compute_dtype == "float16"
