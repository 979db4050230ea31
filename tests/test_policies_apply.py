"""A policy reaches every layer, and nothing but the policy changes."""

import keras
import numpy as np
import pytest
from keras import layers
from policies_models import BUILDERS, INPUT, dense_model, fit, functional

from keras_mixprec import PrecisionPlan, PrecisionRule, apply_policy
from keras_mixprec.policies.layers import walk

MODES = ["eager", "graph", "jit"]
if keras.backend.backend() == "torch":  # compiles C++, for minutes
    MODES.remove("jit")


def numbers(values):
    return keras.ops.convert_to_numpy(keras.ops.cast(values, "float32"))


@pytest.mark.parametrize("build", BUILDERS)
def test_every_layer_follows_and_the_numbers_too(build):
    model = build()
    exact = numbers(model(INPUT))
    apply_policy(model, "mixed_bfloat16", rules=[])
    found = [entry.layer for entry in walk(model)]
    assert {layer.compute_dtype for layer in found} == {"bfloat16"}
    assert {layer.variable_dtype for layer in found} == {"float32"}
    assert len({id(layer.dtype_policy) for layer in found}) == len(found)
    rough = model(INPUT)
    assert keras.backend.standardize_dtype(rough.dtype) == "bfloat16"
    assert 0 < np.abs(numbers(rough) - exact).max() < 0.1
    apply_policy(model, "float32")
    assert np.array_equal(numbers(model(INPUT)), exact)


def test_the_model_itself_follows():
    model = dense_model()
    plan = apply_policy(model, "mixed_bfloat16", rules=[])
    assert set(plan.values()) == {plan.default} == {"mixed_bfloat16"}
    assert model.dtype_policy.name == "mixed_bfloat16"


@pytest.mark.parametrize("mode", MODES)
def test_training_and_predicting_follow_after_compilation(mode):
    model = dense_model()
    options = {"run_eagerly": mode == "eager", "jit_compile": mode == "jit"}
    model.compile("sgd", "mse", **options)
    # 1e5 does not fit in float16, so the loss tells what the step used.
    x, y = np.full((8, 4), 1e5, "float32"), np.ones((8, 2), "float32")
    assert model.predict(x, verbose=0).dtype == "float32"
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    apply_policy(model, "mixed_float16", rules=[])
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
            apply_policy(self.model, "float16" if epoch == 1 else "float32")

    with pytest.warns(UserWarning, match="keep their dtype"):
        model.fit(
            np.full((8, 4), 1e5, "float32"),
            np.ones((8, 2), "float32"),
            epochs=4,
            verbose=0,
            callbacks=[Switch()],
        )
    assert [bool(np.isfinite(loss)) for loss in seen[:3]] == [True, True, False]


def test_only_compiled_functions_change():
    model = dense_model()
    fit(model)
    compiled = model.train_function
    state = [*model.variables, *model.optimizer.variables]
    before = [numbers(v.value) for v in state]
    apply_policy(model, "mixed_bfloat16")
    assert all(map(np.array_equal, before, [numbers(v.value) for v in state]))
    assert model.train_function is not compiled
    assert model.predict_function is None
    fit(model)
    assert int(model.optimizer.iterations) == 2


def test_float16_after_build_keeps_float32_variables_and_says_so():
    model = dense_model()
    with pytest.warns(UserWarning, match="3 built layer.*'dense' first"):
        plan = apply_policy(model, "float16", rules=[])
    assert set(plan.values()) == {"mixed_float16"}
    assert "not float16" in plan.notes["dense"]
    assert {v.dtype for v in model.weights} == {"float32"}


def test_float16_before_build_makes_float16_variables():
    model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    apply_policy(model, "float16", rules=[])
    model.build((None, 3))
    assert {v.dtype for v in model.weights} == {"float16"}


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
    assert plan.notes["small"] == "left alone: it follows int8_from_float32"
    assert plan["head"] == "float32"
    assert plan.diff(plan.apply(model)) == []


def test_a_policy_map_is_replaced_and_not_written_to():
    shared = keras.dtype_policies.DTypePolicyMap()
    shared["a"] = keras.DTypePolicy("float16")
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="a", dtype=shared)(inputs)
    model = keras.Model(inputs, layers.Dense(4, name="b", dtype=shared)(x))
    assert PrecisionPlan.from_model(model) == {"a": "float16", "b": "float32"}
    apply_policy(model, "mixed_bfloat16", rules=[])
    assert {x.compute_dtype for x in model.layers[1:]} == {"bfloat16"}
    assert list(shared) == ["a"]


def test_auto_and_policy_objects_are_understood():
    model = dense_model()
    policy = keras.DTypePolicy("mixed_bfloat16")
    assert apply_policy(model, policy)["dense"] == "mixed_bfloat16"
    assert apply_policy(model, "auto")["dense"] in ("float32", policy.name)


def test_a_rule_that_raises_leaves_the_model_as_it_was():
    model = functional()
    before = PrecisionPlan.from_model(model)

    def broken(layer, path):
        return path == "logits" and 1 / 0

    with pytest.raises(ZeroDivisionError):
        apply_policy(model, "mixed_bfloat16", rules=[PrecisionRule(broken)])
    assert before.diff(PrecisionPlan.from_model(model)) == []


def test_functions_of_nested_compiled_models_are_rebuilt():
    inner = dense_model()
    inner.predict(np.ones((2, 4)), verbose=0)
    apply_policy(keras.Sequential([inner]), "mixed_float16", rules=[])
    assert inner.predict(np.ones((2, 4)), verbose=0).dtype == "float16"


class TwoInputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(4), layers.Dense(4)

    def call(self, inputs):
        return self.left(inputs[0]) + self.right(inputs[1])


@pytest.mark.parametrize("structure", [tuple, list])
def test_a_built_model_of_several_inputs(structure):
    model = TwoInputs()
    model(structure((np.ones((2, 4), "float32"), np.ones((2, 3), "float32"))))
    plan = apply_policy(model, "mixed_float16", rules=[])
    assert set(plan.values()) == {"mixed_float16"}
