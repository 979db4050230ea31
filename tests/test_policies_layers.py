"""Every layer is found once, under a path that no counter can shift."""

import keras
import pytest
from keras import layers
from policies_models import BUILDERS, INPUT, Subclassed, functional

import keras_mixprec as kmp
from keras_mixprec.policies import layers as policy_layers
from keras_mixprec.policies.layers import keras_path, stable_names, walk


def paths(model):
    return [entry.path for entry in walk(model)]


@pytest.mark.parametrize("build", BUILDERS)
def test_paths_are_unique_and_cover_what_keras_flattens(build):
    model = build()
    expected = {
        id(layer)
        for layer in model._flatten_layers(include_self=False)
        if not isinstance(layer, layers.InputLayer)
    }
    entries = walk(model)
    assert {id(entry.layer) for entry in entries} == expected
    assert len({entry.path for entry in entries}) == len(entries)
    assert len(entries) == len(expected)


@pytest.mark.parametrize("build", BUILDERS)
def test_paths_are_the_same_for_a_second_copy(build):
    first = paths(build())
    layers.Dense(1), layers.LSTM(1), layers.MultiHeadAttention(1, 1)
    assert paths(build()) == first


def test_paths_are_the_same_in_a_fresh_process():
    layers.Dense(1), layers.Softmax()
    first = paths(functional())
    # All that a fresh process changes is that the counters start from 0.
    keras.backend.clear_session()
    assert paths(functional()) == first


@pytest.mark.parametrize("build", BUILDERS)
def test_paths_survive_saving(build, tmp_path):
    model = build()
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert paths(loaded) == paths(model)


def test_attention_and_its_parts_have_readable_paths():
    names = ["", "/query", "/key", "/value", "/softmax", "/dropout"]
    expected = [f"multi_head_attention{n}" for n in names]
    assert paths(functional())[:6] == expected


def test_sequential_and_functional_agree():
    stack = [layers.Dense(3), layers.Dense(2), layers.Dense(1, name="head")]
    sequential = keras.Sequential([keras.Input((4,)), *stack])
    inputs = keras.Input((4,))
    x = inputs
    for layer in stack:
        x = layer(x)
    model = keras.Model(inputs, x)
    assert paths(sequential) == paths(model) == ["dense", "dense_1", "head"]


def test_building_adds_layers_and_moves_none():
    model = Subclassed()
    before = paths(model)
    model(INPUT)
    after = paths(model)
    assert [path for path in after if path in before] == before
    assert "late_block/block/dense" in after


def test_bidirectional_parts_lose_their_counter():
    layers.LSTM(2), layers.LSTM(2)
    inputs = keras.Input((5, 4))
    outputs = layers.Bidirectional(layers.LSTM(2))(inputs)
    assert "bidirectional/forward_lstm/lstm_cell" in paths(
        keras.Model(inputs, outputs)
    )


def test_only_layers_are_found():
    class Holder(keras.Model):
        def __init__(self):
            super().__init__()
            self.metric = keras.metrics.Mean()
            self.optimizer_kept = keras.optimizers.SGD()
            self.seed = keras.random.SeedGenerator(0)
            self.dense = layers.Dense(1)

    assert paths(Holder()) == ["dense"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["dense_7", "dense_9"], ["dense", "dense_1"]),
        (["dense_9", "dense_7"], ["dense_1", "dense"]),
        (["a", "a", "dense_3"], ["a", "a_1", "dense"]),
        (["head", "dense_2", "my_dense_5"], ["head", "dense", "my_dense_5"]),
    ],
)
def test_stable_names(names, expected):
    assert stable_names([layers.Dense(1, name=n) for n in names]) == expected


def test_keras_path_gives_the_names_of_this_process():
    layers.Dense(1)
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    entry = walk(keras.Sequential([keras.Input((2,)), inner]))[1]
    assert keras_path(entry) == f"{inner.name}/{inner.layers[0].name}"


# Names that end in a number, by the code or by Keras' counter.


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has made no layer yet."""
    keras.backend.clear_session()
    monkeypatch.setattr(policy_layers, "_GIVEN", set())


def named(*names):
    parts = [layers.Dense(2, name=name) for name in names]
    return keras.Sequential([keras.Input((2,)), *parts])


@pytest.mark.parametrize(
    "names",
    [("dense_1", "dense_2"), ("dense_0", "dense_1"), ("dense_2", "dense_1")],
)
def test_names_that_the_code_gives_stay(fresh, names):
    model = named(*names)
    assert paths(model) == [*names]
    for _ in range(5):
        layers.Dense(1)  # Keras' counter passes them.
    assert paths(model) == paths(keras.models.clone_model(model)) == [*names]


def test_counters_of_a_second_model_are_none(fresh):
    layers.Dense(1)
    assert paths(named(None, None)) == ["dense", "dense_1"]


@pytest.mark.parametrize("known", [True, False])
def test_a_plan_fits_whether_names_were_known_to_be_given(fresh, known):
    plan = kmp.apply_policy(
        named("dense_1", "dense_2"),
        "mixed_float16",
        rules=[kmp.PrecisionRule("dense_2")],
    )
    assert plan["dense_2"] == "float32"
    for _ in range(5):
        layers.Dense(1)
    if not known:
        policy_layers._GIVEN.clear()
    again = named("dense_1", "dense_2")
    plan.apply(again)
    dtypes = [layer.compute_dtype for layer in again.layers]
    assert dtypes == ["float16", "float32"]


def test_a_rule_for_keras_name_says_what_the_path_is(fresh):
    for _ in range(3):
        layers.Dense(1)
    with pytest.warns(UserWarning, match="its path is 'dense_1'"):
        kmp.apply_policy(
            named(None, None),
            "mixed_float16",
            rules=[kmp.PrecisionRule("dense_4")],
        )
