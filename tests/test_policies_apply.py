"""A policy reaches every layer, and nothing else changes.

This includes layers that are made later, files and the global policy.
"""

import threading

import keras
import numpy as np
import pytest
from keras import layers
from optimizer_models import rarely
from policies_models import INPUT, Subclassed, functional, recurrent, subclassed

import keras_mixprec as kmp
from keras_mixprec import PrecisionPlan, PrecisionRule, apply_policy
from keras_mixprec.policies import scope
from keras_mixprec.policies.layers import walk

plan_of = PrecisionPlan.from_model


def numbers(values):
    return keras.ops.convert_to_numpy(keras.ops.cast(values, "float32"))


def dense_model():
    parts = [layers.Dense(units) for units in (8, 4, 2)]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("adam", "mse", jit_compile=False)
    return model


def reload(model, tmp_path, global_policy="float32"):
    model.save(tmp_path / "m.keras")
    keras.config.set_dtype_policy(global_policy)
    return keras.models.load_model(tmp_path / "m.keras")


@pytest.mark.long
@pytest.mark.parametrize("build", [rarely(recurrent), functional, subclassed])
def test_every_layer_follows_and_the_plan_restores_what_a_file_loses(
    build, tmp_path
):
    model = build()
    exact = numbers(model(INPUT))
    plan = apply_policy(model, "mixed_bfloat16", rules=[])
    assert set(plan.values()) == {plan.default} == {"mixed_bfloat16"}
    assert model.dtype_policy.name == "mixed_bfloat16"
    found = [entry.layer for entry in walk(model)]
    assert {layer.compute_dtype for layer in found} == {"bfloat16"}
    assert {layer.variable_dtype for layer in found} == {"float32"}
    assert len({id(layer.dtype_policy) for layer in found}) == len(found)
    rough = model(INPUT)
    assert keras.backend.standardize_dtype(rough.dtype) == "bfloat16"
    assert 0 < np.abs(numbers(rough) - exact).max() < 0.1
    loaded = reload(model, tmp_path, "mixed_float16")
    lost = plan.diff(plan_of(loaded))
    assert any("block" in change.path for change in lost)
    plan.apply(loaded)
    assert plan.diff(plan_of(loaded)) == []
    np.testing.assert_array_equal(numbers(loaded(INPUT)), numbers(rough))
    apply_policy(model, "float32")
    np.testing.assert_array_equal(numbers(model(INPUT)), exact)


@pytest.mark.one_backend
def test_variables_of_float16_are_made_before_build_alone():
    model = dense_model()
    with pytest.warns(UserWarning, match="3 built.*'dense'"):
        plan = apply_policy(model, "float16", rules=[])
    assert set(plan.values()) == {"mixed_float16"}
    assert "float16" in plan.notes["dense"]
    assert {v.dtype for v in model.weights} == {"float32"}
    model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    apply_policy(model, "float16", rules=[])
    model.build((None, 3))
    assert {v.dtype for v in model.weights} == {"float16"}


@pytest.mark.one_backend
def test_quantized_and_integer_layers_are_left_alone():
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            layers.Identity(dtype="int64", name="ids"),
            layers.Embedding(4, 4),
            layers.Dense(4, name="small"),
            layers.Dense(1, name="head"),
        ]
    )
    model.layers[2].quantize("int8")
    plan = apply_policy(model, "mixed_bfloat16")
    assert plan["small"] == "int8_from_float32"
    assert plan["ids"] == "int64"
    assert "int8_from_float32" in plan.notes["small"]
    assert plan["head"] == "float32"
    assert plan.diff(plan.apply(model)) == []


RULES = [PrecisionRule("*/softmax"), PrecisionRule("late_block/block")]


@pytest.mark.parametrize("by_fit", [False, rarely(True)])
def test_late_sublayers_follow_the_last_call_before_build(by_fit):
    model = Subclassed()
    apply_policy(model, "mixed_float16", rules=[])
    apply_policy(model, "mixed_bfloat16", rules=RULES)
    if by_fit:
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(INPUT, np.ones((2, 5, 2), "float32"), verbose=0)
    else:
        model(INPUT)
    wide = {
        path for path, policy in plan_of(model).items() if "16" not in policy
    }
    assert wide == {"multi_head_attention/softmax"} | {
        f"late_block/block{part}"
        for part in ("", "/dense", "/layer_normalization")
    }
    assert set(plan_of(model).values()) == {"float32", "mixed_bfloat16"}


@pytest.mark.one_backend
def test_a_scope_restores_what_was_there():
    @kmp.policy_scope("float64")
    def build():
        return layers.Dense(1).compute_dtype

    @kmp.policy_scope("float32")
    def fail():
        keras.backend.clear_session()
        raise ZeroDivisionError

    with kmp.policy_scope("float64") as outer:
        assert layers.Dense(1).compute_dtype == outer.name == "float64"
        with kmp.policy_scope("float32"):
            assert [build(), build()] == ["float64", "float64"]
            assert layers.Dense(1).compute_dtype == "float32"
        with pytest.raises(ZeroDivisionError):
            fail()
        assert kmp.global_policy().name == "float64"
        # Another thread has a policy of its own.
        seen = []
        note = lambda: seen.append(kmp.global_policy().name)  # noqa: E731
        thread = threading.Thread(target=note)
        thread.start()
        thread.join()
        assert seen == ["float32"]
    policies = keras.dtype_policies.DTypePolicyMap()
    keras.config.set_dtype_policy(policies)
    with kmp.policy_scope("float32"):
        pass
    assert kmp.global_policy() is policies


@pytest.mark.one_backend
def test_rules_go_with_the_policy():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a")])
    with kmp.policy_scope("float32", rules=[PrecisionRule("a", "float64")]):
        assert apply_policy(model, "mixed_bfloat16")["a"] == "float64"
        with kmp.policy_scope("float32", rules=[]):
            plan = apply_policy(model, "mixed_bfloat16")
            assert plan["a"] == "mixed_bfloat16"
    assert scope.current_rules() is kmp.DEFAULT_RULES
