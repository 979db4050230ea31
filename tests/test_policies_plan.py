"""A plan is a mapping that knows its model, its reasons and its changes."""

import keras
import pytest
from keras import layers
from policies_models import functional

from keras_mixprec import PrecisionPlan, PrecisionRule, apply_policy


def two_layers(*names):
    stack = [layers.Dense(2, name=name) for name in names or ("a", "b")]
    return keras.Sequential([keras.Input((2,)), *stack])


def test_it_is_a_mapping_in_model_order():
    model = functional()
    plan = PrecisionPlan.from_model(model)
    assert list(plan)[0] == "multi_head_attention"
    assert list(plan)[-1] == "softmax"
    assert plan["logits"] == plan.default == "float32"
    assert dict(plan) == plan
    assert len(plan) == len(list(plan))


def test_it_carries_why_each_entry_is_there():
    rule = PrecisionRule("b", reason="targets reach 1e5")
    model = two_layers()
    plan = apply_policy(model, "mixed_bfloat16", rules=[rule])
    assert plan.reasons == {"b": "targets reach 1e5"}
    assert plan.apply(two_layers()).reasons == plan.reasons


def test_diff_names_each_change():
    before = PrecisionPlan({"a": "float32", "b": "float32"})
    after = PrecisionPlan({"a": "float16", "c": "float32"}, "float16")
    assert [str(change) for change in before.diff(after)] == [
        "<model>: float32 -> float16",
        "a: float32 -> float16",
        "b: float32 -> absent",
        "c: absent -> float32",
    ]
    assert before.diff(before) == []


def test_a_layer_without_an_entry_follows_the_one_that_holds_it():
    plan = PrecisionPlan(
        {"multi_head_attention": "mixed_bfloat16", "add": "float32"}
    )
    inputs = keras.Input((5, 4))
    x = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    model = keras.Model(inputs, layers.Add()([x, inputs]))
    applied = plan.apply(model)
    assert applied["multi_head_attention/softmax"] == "mixed_bfloat16"
    assert applied["add"] == "float32"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": "float32"}, "missing layer 'b'"),
        ({"a": "float32", "b": "float32", "bb": "float32"}, "nearest is 'b'"),
        ({"a": "float32", "b": "int8_from_float32"}, "quantize it first"),
    ],
    ids=["missing", "unknown", "quantized"],
)
def test_a_plan_for_another_model_is_refused(policies, message):
    model = two_layers()
    with pytest.raises(ValueError, match=message):
        PrecisionPlan(policies).apply(model)
    assert PrecisionPlan.from_model(model)["a"] == "float32"


def test_keras_own_name_is_recognized():
    layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    name = model.layers[0].name
    with pytest.raises(ValueError, match="Keras gave it.*its path is 'dense'"):
        PrecisionPlan({name: "float32"}).validate(model)


def test_an_ambiguous_path_lists_what_it_could_be():
    model = functional()
    plan = PrecisionPlan({**PrecisionPlan.from_model(model), "d": "float32"})
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="d")])
    other = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="d")])
    both = keras.Sequential([inner, other])
    with pytest.raises(ValueError, match="ambiguous, it could be 'sequential"):
        plan.validate(both)


def test_text_fits_a_screen_and_names_what_differs():
    names = [f"layer_{chr(97 + i // 8)}{chr(97 + i % 8)}" for i in range(64)]
    plan = PrecisionPlan(dict.fromkeys(names, "float16"))
    assert repr(plan) == "<PrecisionPlan of 64 layers: 64 float16>"
    assert len(str(plan).splitlines()) == 32
    assert "... and 34 more" in str(plan)
    assert "layer_aa" in str(plan)


def test_a_plan_without_other_layers_announces_none():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    assert str(PrecisionPlan.from_model(model)).endswith("; all float32")
