"""`lint` and what it returns: sorted, applied, restored, refused."""

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
    plain_adam,
    samples,
    scale_of_a_billionth,
    stepping,
    unit_normalization,
)
from lint_data_cases import overflow_in_a_product
from policies_models import BUILDERS

import keras_mixprec as kmp
from keras_mixprec.analysis.lint import dry_run_rules


def test_the_most_severe_come_first():
    order = ["high", "medium", "low"]
    found = [order.index(f.severity) for f in kmp.lint(plain_adam())]
    assert found == sorted(found)
    assert len(set(found)) > 1


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


def test_what_was_applied_is_found_no_more():
    for build in (scale_of_a_billionth, plain_adam, unit_normalization):
        model = build()
        before = {(f.rule, f.layer) for f in kmp.lint(model) if f.repairs}
        kmp.lint(model).apply()
        after = {(f.rule, f.layer) for f in kmp.lint(model)}
        assert before
        assert not before & after


def test_a_model_is_checked_as_it_would_be_under_a_policy():
    model = mlp(8, 8, policy="float32")
    model.get_layer("d0").kernel.assign(np.full((64, 8), 1e6))
    found = kmp.lint(model, policy="mixed_float16")
    assert [f.layer for f in found.at_least("high")] == ["d0"]
    assert "under mixed_float16" in str(found)
    assert not kmp.lint(model).at_least("high")
    plan = found.apply("high")
    assert (plan["d0"], plan["d1"]) == ("float32", "float32")


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


def test_training_after_lint_is_as_without():
    def trained(with_lint):
        keras.utils.set_random_seed(0)
        model = mlp(16, 8)
        compiled(model, kmp.LossScaleOptimizer("adam"))
        x, y = samples(32), samples(32, 8)
        if with_lint:
            kmp.lint(model, x, y)
        return model.fit(x, y, shuffle=False, verbose=0).history["loss"]

    assert trained(True) == trained(False)


def test_all_forms_say_the_same():
    found = kmp.lint(scale_of_a_billionth())
    assert json.loads(found.to_json()) == found.to_dict()
    assert "1e-09 is 0 in float16" in str(found)
    for form in (str(found), found.to_html()):
        assert all(f.rule in form for f in found)
    assert "PrecisionRule('bytes', 'float32')" in str(found)


def test_infinities_are_json():
    model, x = overflow_in_a_product()
    text = kmp.lint(model, x).to_json()
    found = json.loads(text, parse_constant=pytest.fail)["findings"]
    assert "inf" in [f["numbers"].get("error") for f in found]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(hands_on=True, name="block")

    def call(self, inputs):
        return self.block(inputs["a"] + inputs["b"])


def test_a_subclassed_model_of_a_dict_is_built_and_run():
    model = float16(Subclassed())
    x = {"a": np.full((4, 8), 1e5), "b": np.ones((4, 8))}
    found = kmp.lint(model, x)
    assert model.built
    assert "wrong_on_the_data" in {f.rule for f in found.at_least("high")}


WRONG = {
    "no model": (lambda: kmp.lint("model"), TypeError, "must be a `keras.Mo"),
    "policy": (lambda: kmp.lint(mlp(8), policy="half"), ValueError, "'half'"),
    "text": (lambda: kmp.lint(mlp(8), "text"), ValueError, "`x` must be an"),
    "number": (lambda: kmp.lint(mlp(8), 3.0), ValueError, "`x` must be an"),
    "nothing": (
        lambda: kmp.lint(mlp(8), np.zeros((0, 64))),
        ValueError,
        "at least one sample",
    ),
    "lengths": (
        lambda: kmp.lint(mlp(8), samples(4), samples(3, 8)),
        ValueError,
        "same number of samples",
    ),
    "callbacks": (
        lambda: kmp.lint(mlp(8), callbacks=["monitor"]),
        TypeError,
        "must be a list of",
    ),
    "severity": (
        lambda: kmp.lint(mlp(8)).at_least("severe"),
        ValueError,
        "severity='severe'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_apply_leaves_a_step_of_the_users_own_alone():
    model = compiled(stepping(Stepping), "sgd")
    (found,) = [f for f in kmp.lint(model) if f.rule == "no_loss_scaling"]
    assert (found.severity, found.call) == ("high", None)
    assert "scale_loss(loss) in train_step" in found.fix
    kmp.lint(model).apply()
    scaling = keras.optimizers.LossScaleOptimizer
    assert not isinstance(model.optimizer, scaling)


def test_a_supposed_policy_needs_no_other_optimizer():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(8)(inputs))
    model.compile("adam", "mse")
    found = kmp.lint(model, policy="mixed_float16")
    severity = {f.rule: f.severity for f in found}
    assert severity["no_loss_scaling"] == "low"


def test_a_child_without_weights_yet():
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],))

        def call(self, x):
            return x * self.scale

    class Parent(keras.Model):
        def __init__(self):
            super().__init__(dtype="mixed_float16")
            self.first = keras.layers.Dense(4, dtype="mixed_float16")
            self.scale = Scale(dtype="mixed_float16")

        def call(self, x):
            return self.scale(self.first(x))

    model = Parent()
    with pytest.warns(UserWarning, match="unbuilt state"):
        model.build((None, 8))
    assert "weights_beyond_format" not in [f.rule for f in kmp.lint(model)]


def test_data_are_run_through_without_a_layer_in_16_bits():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    (found,) = kmp.lint(model, np.ones((8, 4)))
    assert found.rule == "no_16_bit_layers"
    assert "the data were only run through" in found.reason
    with pytest.raises(ValueError, match="shape"):
        kmp.lint(model, np.ones((8, 5)))


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


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("UNIMPLEMENTED: Unsupported element type F16 in dot", "This device"),
        ("\"addmm\" not implemented for 'Half'", "This device"),
        ("cannot compute AddV2: expected float tensor, is half", "Cast one"),
        ("all elements of input should be between 0 and 1", "Values that"),
    ],
)
def test_what_raises_is_the_device_a_mix_of_dtypes_or_a_value(message, fix):
    found = dry_run_rules._raises(RuntimeError(message))
    assert found.fix.startswith(fix)
    assert found.numbers["error"] == message
