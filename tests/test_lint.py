"""`lint` and its findings: order, fixes, undoing fixes, wrong calls."""

import json
import tracemalloc

import keras
import numpy as np
import pytest
from lint_cases import (
    Block,
    Stepping,
    compiled,
    float16,
    mlp,
    overflow_in_a_product,
    plain_adam,
    raises_in_16_bits_only,
    samples,
    scale_of_a_billionth,
    stepping,
    with_kernel,
)
from policies_models import BUILDERS

import keras_mixprec as kmp


def test_all_forms_say_the_same_with_the_most_severe_first():
    order = ["high", "medium", "low"]
    infinite = kmp.lint(*overflow_in_a_product())
    for found in kmp.lint(plain_adam()), infinite:
        severities = [order.index(f.severity) for f in found]
        assert severities == sorted(severities)
        assert len(set(severities)) > 1
        for form in str(found), found.to_html(), found.to_json():
            assert all(f.rule in form for f in found)
    findings = json.loads(infinite.to_json(), parse_constant=pytest.fail)
    errors = [f["numbers"].get("error") for f in findings["findings"]]
    assert "inf" in errors
    found = kmp.lint(scale_of_a_billionth())
    assert json.loads(found.to_json()) == found.to_dict()
    assert "PrecisionRule('bytes', 'float32')" in str(found)
    assert "1e-09" in str(found)


def test_apply_repairs_and_keeps_the_rest():
    inputs = keras.Input((4,))
    x = keras.layers.Rescaling(1e-9, name="scale")(inputs)
    x = keras.layers.Dense(8, name="wide", dtype="float32")(x)
    model = keras.Model(inputs, keras.layers.Dense(8, name="head")(x))
    model.get_layer("scale").dtype_policy = "mixed_float16"
    model.get_layer("head").dtype_policy = "mixed_bfloat16"
    plan = kmp.lint(model).apply("high")
    expected = {"scale": "float32", "wide": "float32", "head": "mixed_bfloat16"}
    assert dict(plan) == expected
    assert plan.reasons["scale"] == "scale=1e-09"


@pytest.mark.parametrize("build", [scale_of_a_billionth, plain_adam])
def test_what_was_applied_is_found_no_more(build):
    model = build()
    before = {(f.rule, f.layer) for f in kmp.lint(model) if f.repairs}
    kmp.lint(model).apply()
    assert before
    assert not before & {(f.rule, f.layer) for f in kmp.lint(model)}


def test_a_model_is_checked_as_it_would_be_under_a_policy():
    model = with_kernel(1e6)
    kmp.apply_policy(model, "float32")
    found = kmp.lint(model, policy="mixed_float16")
    assert [f.layer for f in found.at_least("high")] == ["d0"]
    assert "mixed_float16" in str(found)
    assert not kmp.lint(model).at_least("high")
    plan = found.apply("high")
    assert (plan["d0"], plan["d1"]) == ("float32", "float32")
    # It would be compiled under that policy, so its optimizer is no fault.
    model = compiled(mlp(8, policy="float32"), "adam")
    found = kmp.lint(model, policy="mixed_float16")
    severity = {f.rule: f.severity for f in found}
    assert severity["no_loss_scaling"] == "low"


@pytest.mark.parametrize("build", BUILDERS)
def test_nothing_is_changed(build):
    model = build()
    kmp.apply_policy(model, "mixed_bfloat16")
    weights = [np.array(w) for w in model.get_weights()]
    plan = kmp.PrecisionPlan.from_model(model)
    kmp.lint(model)
    kmp.lint(model, policy="mixed_float16")
    assert not plan.diff(kmp.PrecisionPlan.from_model(model))
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_subclassed_model_of_a_dict_is_built_and_run():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.block = Block(hands_on=True, name="block")

        def call(self, inputs):
            return self.block(inputs["a"] + inputs["b"])

    model = float16(Subclassed())
    x = {"a": np.full((4, 8), 1e5), "b": np.ones((4, 8))}
    found = kmp.lint(model, x)
    assert model.built
    assert "wrong_on_the_data" in {f.rule for f in found.at_least("high")}


def test_rules_are_selected_and_ignored_by_their_codes():
    model = plain_adam()
    every = {f.code for f in kmp.lint(model)}
    some = {code for code in every if code.startswith("KMP4")}
    assert "KMP404" in some < every
    assert {f.code for f in kmp.lint(model, select=["KMP4"])} == some
    rest = kmp.lint(model, ignore=["KMP4", "KMP601"])
    assert {f.code for f in rest} == every - some


WRONG = {
    "must be a `keras.Mo": lambda: kmp.lint("model"),
    "`x` must be an.*text": lambda: kmp.lint(mlp(8), "text"),
    "at least one": lambda: kmp.lint(mlp(8), np.zeros((0, 64))),
    "be a list": lambda: kmp.lint(mlp(8), callbacks=["monitor"]),
    "select.*KMP9": lambda: kmp.lint(mlp(8), select=["KMP9"]),
    "ignore.*list": lambda: kmp.lint(mlp(8), ignore="KMP101"),
    "severity='severe'": lambda: kmp.lint(mlp(8)).at_least("severe"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_call_is_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()


def test_apply_leaves_a_step_of_the_users_own_alone():
    model = compiled(stepping(Stepping), "sgd")
    (found,) = [f for f in kmp.lint(model) if f.rule == "no_loss_scaling"]
    assert (found.severity, found.call) == ("high", None)
    assert "scale_loss(loss)" in found.fix
    kmp.lint(model).apply()
    scaling = keras.optimizers.LossScaleOptimizer
    assert not isinstance(model.optimizer, scaling)


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_large_data_need_little_memory(dtype):
    x = np.ones((1 << 20, 16), dtype)
    y = np.ones((len(x), 2), "uint8")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    kmp.lint(model, x[:256], y[:256], policy="mixed_float16")  # Imports.
    tracemalloc.start()
    try:
        kmp.lint(model, x, y, policy="mixed_float16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 2


@pytest.mark.one_backend
def test_what_raises_in_16_bits_is_a_finding():
    message = "AddV2: got 'half'"
    model = raises_in_16_bits_only(message)
    (found,) = kmp.lint(model, samples(8, 4)).at_least("high")
    assert (found.rule, found.layer) == ("wrong_on_the_data", "own")
    # Keras puts what it calls around it, dtypes among that.
    assert found.numbers["error"] == message
    assert "keras.ops.cast" in found.fix
