"""A policy reaches every layer, and nothing but the policy changes.

Layers that are made later, files and the global policy included.
"""

import threading

import keras
import numpy as np
import pytest
from keras import layers
from optimizer_models import rarely
from policies_models import (
    INPUT,
    LateBlock,
    Subclassed,
    functional,
    recurrent,
    subclassed,
)

import keras_mixprec as kmp
from keras_mixprec import PrecisionPlan, PrecisionRule, apply_policy
from keras_mixprec.policies import scope
from keras_mixprec.policies.layers import walk

MODES = ["eager", "graph", "jit"]
if keras.backend.backend() == "torch":  # compiles C++, for minutes
    MODES.remove("jit")
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


@pytest.mark.parametrize("mode", MODES)
def test_training_and_predicting_follow_after_compilation(mode):
    model = dense_model()
    options = {"run_eagerly": mode == "eager", "jit_compile": mode == "jit"}
    model.compile("sgd", "mse", **options)
    # 1e5 does not fit in float16, so the loss tells what the step used.
    x, y = np.full((8, 4), 1e5, "float32"), np.ones((8, 2), "float32")
    assert model.predict(x, verbose=0).dtype == "float32"
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    # Functions of nested models as well.
    apply_policy(keras.Sequential([model]), "mixed_float16", rules=[])
    assert model.predict(x, verbose=0).dtype == "float16"
    assert not np.isfinite(model.evaluate(x, y, verbose=0))
    apply_policy(model, "float32")
    model.reset_metrics()  # As `train_on_batch` itself does from 3.14 on.
    assert np.isfinite(model.train_on_batch(x, y))


def test_a_change_inside_fit_takes_effect_on_the_next_step():
    model, seen = dense_model(), []

    class Switch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["loss"])
            state = [*model.variables, *model.optimizer.variables]
            before = [numbers(v.value) for v in state]
            compiled = model.train_function
            apply_policy(model, "float16" if epoch == 1 else "float32")
            assert model.train_function is not compiled
            for value, variable in zip(before, state, strict=True):
                np.testing.assert_array_equal(value, numbers(variable.value))

    x, y = np.full((8, 4), 1e5, "float32"), np.ones((8, 2), "float32")
    with pytest.warns(UserWarning, match="keep their dtype"):
        model.fit(x, y, epochs=4, verbose=0, callbacks=[Switch()])
    assert [bool(np.isfinite(loss)) for loss in seen[:3]] == [True, True, False]


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


@pytest.mark.one_backend
def test_a_policy_map_is_replaced_and_not_written_to():
    shared = keras.dtype_policies.DTypePolicyMap()
    shared["a"] = keras.DTypePolicy("float16")
    inputs = x = keras.Input((4,))
    for name in "ab":
        x = layers.Dense(4, name=name, dtype=shared)(x)
    model = keras.Model(inputs, x)
    assert plan_of(model) == {"a": "float16", "b": "float32"}
    apply_policy(model, "mixed_bfloat16", rules=[])
    assert {x.compute_dtype for x in model.layers[1:]} == {"bfloat16"}
    assert list(shared) == ["a"]


@pytest.mark.one_backend
def test_auto_and_policy_objects_are_understood():
    model = dense_model()
    policy = keras.DTypePolicy("mixed_bfloat16")
    assert apply_policy(model, policy)["dense"] == "mixed_bfloat16"
    assert apply_policy(model, "auto")["dense"] in ("float32", policy.name)


@pytest.mark.one_backend
def test_a_rule_that_raises_leaves_the_model_as_it_was():
    model = functional()
    before = plan_of(model)

    def broken(layer, path):
        return path == "logits" and 1 / 0

    with pytest.raises(ZeroDivisionError):
        apply_policy(model, "mixed_bfloat16", rules=[PrecisionRule(broken)])
    assert before.diff(plan_of(model)) == []


class TwoInputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(4), layers.Dense(4)

    def call(self, inputs):
        return self.left(inputs[0]) + self.right(inputs[1])


@pytest.mark.one_backend
@pytest.mark.parametrize("structure", [tuple, list])
def test_a_built_model_of_several_inputs(structure):
    model = TwoInputs()
    model(structure((np.ones((2, 4), "float32"), np.ones((2, 3), "float32"))))
    plan = apply_policy(model, "mixed_float16", rules=[])
    assert set(plan.values()) == {"mixed_float16"}


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
def test_plans_of_built_models_apply_to_others_and_the_reverse():
    built, fresh = Subclassed(), Subclassed()
    built(INPUT)
    early = apply_policy(Subclassed(), "mixed_bfloat16", rules=[])
    assert set(early.apply(built).values()) == {"mixed_bfloat16"}
    plan = apply_policy(built, "mixed_bfloat16", rules=RULES[:1])
    plan.apply(fresh)
    fresh(INPUT)
    assert plan.diff(plan_of(fresh)) == []


@pytest.mark.one_backend
def test_build_is_keras_own_again_afterwards():
    class Late(keras.Model):
        def build(self, shape):
            self.block = LateBlock()
            self.block.build(shape)

        def call(self, x):
            return self.block(x)

    model = Late()
    own = model.build
    apply_policy(model, "mixed_bfloat16")
    assert model.build is not own
    model(INPUT)
    assert model.build is own
    assert model.block.dense.compute_dtype == "bfloat16"
    assert model.block.dense.kernel.dtype == "float32"


@pytest.mark.parametrize("global_policy", ["float32", "mixed_float16"])
def test_a_file_keeps_the_dtypes_of_keras_own_layers(tmp_path, global_policy):
    inputs = keras.Input((5, 4))
    x = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(2))(layers.Add()([x, inputs]))
    model = keras.Model(inputs, layers.Dense(2)(x))
    plan = apply_policy(model, "mixed_bfloat16")
    loaded = plan_of(reload(model, tmp_path, global_policy))
    # The model's own policy is not saved, and computes nothing here.
    assert {change.path for change in plan.diff(loaded)} == {"<model>"}
    # Nor are parts of attention, for which the plan is needed.
    plan = apply_policy(model, "mixed_bfloat16", rules=RULES[:1])
    loaded = reload(model, tmp_path)
    lost = [change.path for change in plan.diff(plan_of(loaded))]
    assert "multi_head_attention/softmax" in lost
    assert plan.apply(loaded).diff(plan) == []


@pytest.mark.one_backend
def test_stale_symbolic_dtypes_do_not_reach_the_file(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    apply_policy(model, "mixed_float16", rules=[])
    assert model.outputs[0].dtype == "float32"
    loaded = reload(model, tmp_path)
    assert loaded.outputs[0].dtype == "float16"
    assert loaded.layers[0].compute_dtype == "float16"


@pytest.mark.one_backend
def test_the_global_policy_auto(capsys):
    policy = kmp.set_global_policy()
    recommendation = kmp.recommend_policy()
    assert policy.name == kmp.global_policy().name == recommendation.policy
    assert recommendation.reason in capsys.readouterr().out
    keras.config.disable_interactive_logging()
    kmp.set_global_policy("auto")
    keras.config.enable_interactive_logging()
    assert capsys.readouterr().out == ""


@pytest.mark.one_backend
@pytest.mark.skipif(
    kmp.recommend_policy().capabilities["kind"] != "cpu", reason="needs a CPU"
)
def test_a_16_bit_policy_on_a_cpu_warns_once():
    scope._warned.clear()
    with pytest.warns(UserWarning, match="CPU"):
        kmp.set_global_policy("mixed_float16")
    policy = kmp.set_global_policy("mixed_float16")
    assert policy.compute_dtype == layers.Dense(1).compute_dtype == "float16"


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
