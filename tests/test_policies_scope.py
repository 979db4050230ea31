"""The global policy: set, warned about, scoped, restored."""

import threading

import keras
import pytest
from keras import layers

from keras_mixprec import (
    DEFAULT_RULES,
    PrecisionRule,
    apply_policy,
    global_policy,
    policy_scope,
    recommend_policy,
    set_global_policy,
)
from keras_mixprec.policies import scope


def test_auto_says_why_and_returns_the_policy(capsys):
    policy = set_global_policy()
    recommendation = recommend_policy()
    assert policy.name == global_policy().name == recommendation.policy
    assert recommendation.reason in capsys.readouterr().out


def test_auto_is_silent_where_keras_is(capsys):
    keras.config.disable_interactive_logging()
    set_global_policy("auto")
    keras.config.enable_interactive_logging()
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(
    recommend_policy().capabilities["kind"] != "cpu", reason="needs a CPU"
)
def test_a_16_bit_policy_on_a_cpu_warns_once():
    scope._warned.clear()
    with pytest.warns(UserWarning, match="no speed here: on a CPU"):
        set_global_policy("mixed_float16")
    assert set_global_policy("mixed_float16").compute_dtype == "float16"
    assert layers.Dense(1).compute_dtype == "float16"


def test_a_scope_restores_what_was_there():
    with policy_scope("float64") as outer:
        assert layers.Dense(1).compute_dtype == outer.name == "float64"
        with policy_scope("float32"):
            assert layers.Dense(1).compute_dtype == "float32"
        assert layers.Dense(1).compute_dtype == "float64"
    assert layers.Dense(1).compute_dtype == "float32"


def test_a_scope_restores_after_an_exception_and_a_cleared_session():
    @policy_scope("float32")
    def fail():
        keras.backend.clear_session()
        raise ZeroDivisionError

    keras.config.set_dtype_policy("float64")
    with pytest.raises(ZeroDivisionError):
        fail()
    assert global_policy().name == "float64"


def test_a_scope_decorates_a_function():
    @policy_scope("float64")
    def build():
        return layers.Dense(1)

    assert [build().dtype, build().dtype] == ["float64", "float64"]
    assert global_policy().name == "float32"


def test_a_scope_restores_a_map():
    policies = keras.dtype_policies.DTypePolicyMap()
    keras.config.set_dtype_policy(policies)
    with policy_scope("float32"):
        pass
    assert global_policy() is policies


def test_rules_go_with_the_policy():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a")])
    with policy_scope("float32", rules=[PrecisionRule("a", "float64")]):
        assert apply_policy(model, "mixed_bfloat16")["a"] == "float64"
        with policy_scope("float32", rules=[]):
            plan = apply_policy(model, "mixed_bfloat16")
            assert plan["a"] == "mixed_bfloat16"
    assert scope.current_rules() is DEFAULT_RULES


def test_another_thread_has_a_policy_of_its_own():
    seen = []
    with policy_scope("float64"):
        thread = threading.Thread(
            target=lambda: seen.append(global_policy().name)
        )
        thread.start()
        thread.join()
    assert seen == ["float32"]
