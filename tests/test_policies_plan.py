"""Plans: a lasting path for every layer, and the file of a plan."""

import json
import os
import time

import keras
import pytest
from keras import layers
from policies_models import BUILDERS, functional

from keras_mixprec import PrecisionPlan
from keras_mixprec.policies.layers import walk

pytestmark = pytest.mark.one_backend


def paths(model):
    return [entry.path for entry in walk(model)]


def named(*names):
    """A model whose layers are named by Keras' counter, where not by us."""
    parts = [layers.Dense(2, name=name) for name in names]
    return keras.Sequential([keras.Input((2,)), *parts])


@pytest.mark.parametrize("build", BUILDERS)
def test_paths_are_those_of_keras_layers_and_last(build, tmp_path):
    model = build()
    expected = {
        id(layer)
        for layer in model._flatten_layers(include_self=False)
        if not isinstance(layer, layers.InputLayer)
    }
    entries = walk(model)
    assert {id(entry.layer) for entry in entries} == expected
    first = paths(model)
    assert len(set(first)) == len(entries) == len(expected)
    layers.Dense(1), layers.LSTM(1), layers.MultiHeadAttention(1, 1)
    assert paths(build()) == first
    model.save(tmp_path / "m.keras")
    assert paths(keras.models.load_model(tmp_path / "m.keras")) == first
    # All that a fresh process changes is that the counters start from 0.
    keras.backend.clear_session()
    assert paths(build()) == first


def test_paths_can_be_read():
    parts = ["", "/query", "/key", "/value", "/softmax", "/dropout"]
    attention = [f"multi_head_attention{part}" for part in parts]
    assert paths(functional())[:6] == attention
    layers.LSTM(2), layers.LSTM(2)
    stack = [layers.Dense(3), layers.Dense(2), layers.Dense(1, name="head")]
    inputs = x = keras.Input((4,))
    for layer in stack:
        x = layer(x)
    for model in keras.Sequential([inputs, *stack]), keras.Model(inputs, x):
        assert paths(model) == ["dense", "dense_1", "head"]
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, layers.Bidirectional(layers.LSTM(2))(inputs))
    assert "bidirectional/forward_lstm/lstm_cell" in paths(model)


# The process may have made another model before, with names or without.
BEFORE = {
    "nothing": lambda: None,
    "more layers": lambda: [layers.Dense(1) for _ in range(9)],
    "names given": lambda: walk(named("dense_1", "dense_2")),
}


@pytest.mark.parametrize("before", BEFORE)
def test_names_that_end_in_a_number(before, tmp_path):
    for names in ["dense_0", "dense_1"], ["dense_7", "dense_2"]:
        keras.backend.clear_session()
        BEFORE[before]()
        # As of a loop, and not as of a constant.
        model = named(*(f"dense_{int(n[-1])}" for n in names))
        assert paths(model) == names
        for _ in range(5):
            layers.Dense(1)  # Keras' counter passes them.
        assert paths(model) == paths(keras.models.clone_model(model)) == names
    keras.backend.clear_session()
    BEFORE[before]()
    model = named(None, None)
    model.save(tmp_path / "m.keras")
    copies = [
        keras.models.clone_model(model),
        keras.models.model_from_json(model.to_json()),
        keras.models.load_model(tmp_path / "m.keras"),
    ]
    for copy in (model, *copies, *map(keras.models.clone_model, copies)):
        assert paths(copy) == ["dense", "dense_1"]


def test_a_layer_without_an_entry_follows_the_one_that_holds_it():
    attention, policy = "multi_head_attention", "mixed_bfloat16"
    plan = PrecisionPlan({attention: policy, "add": "float32"})
    inputs = keras.Input((5, 4))
    x = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    applied = plan.apply(keras.Model(inputs, layers.Add()([x, inputs])))
    assert applied[f"{attention}/softmax"] == policy
    assert applied["add"] == "float32"


A, B = {"a": "float32"}, {"b": "float32"}


@pytest.mark.parametrize(
    ("policies", "names"),
    [(A, "'b'"), (A | B | {"bb": "float32"}, "'bb'.*'b'")],
    ids=["missing", "unknown"],
)
def test_a_plan_for_another_model_is_refused(policies, names):
    model = named("a", "b")
    with pytest.raises(ValueError, match=names):
        PrecisionPlan(policies).apply(model)
    assert PrecisionPlan.from_model(model)["a"] == "float32"


PLAN = PrecisionPlan(
    {"b": "mixed_float16", "a/c": "float32"},
    "mixed_float16",
    reasons={"a/c": "why"},
    notes={"b": "left alone"},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


def assert_holds_the_plan_alone(path):
    loaded = PrecisionPlan.load(str(path))
    assert loaded.diff(PLAN) == []
    assert list(loaded) == ["b", "a/c"]
    assert (loaded.reasons, loaded.notes) == (PLAN.reasons, PLAN.notes)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_holds_the_plan_alone(path):
    for _ in range(2):
        PLAN.save(path)
        assert_holds_the_plan_alone(path)
    broken = PrecisionPlan(PLAN)
    broken.reasons["b"] = object()
    with pytest.raises(TypeError, match="JSON serializable"):
        broken.save(path)
    assert_holds_the_plan_alone(path)


def written(**changes):
    content = {"format": "keras_mixprec.plan", "version": 1, "layers": [ENTRY]}
    return json.dumps({**content, **changes})


ENTRY = {"path": "a", "policy": "float32"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (written()[:-20], "damaged"),
        (written(format="other"), "`format`"),
        (written(version=2), "newer.*version=2"),
        (written(default="\ud800"), "not JSON"),
        (written(layers=[ENTRY | {"policy": "x"}]), "not know"),
        (written(layers=2 * [ENTRY]), "twice"),
    ],
)
def test_a_damaged_file_is_refused(text, message, path):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        PrecisionPlan.load(path)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "plan.json", tmp_path / "link.json"
    link.symlink_to(target)
    for _ in range(2):  # At first it leads nowhere.
        PLAN.save(link)
        assert link.is_symlink()
        assert_holds_the_plan_alone(target)
    assert sorted(os.listdir(tmp_path)) == ["link.json", "real"]


def test_only_what_was_left_unfinished_is_removed(path):
    fcntl = pytest.importorskip("fcntl")
    folder = path.parent
    names = ["plan.json.0123abcd.mixprec.tmp", "plan.json.tmp", "x.mixprec.tmp"]
    for name in names:
        (folder / name).write_text("{")
        os.utime(folder / name, (time.time() - 60,) * 2)
    # Somebody may write these at this moment.
    new, locked = (
        folder / f"plan.json.{n}9abcdef.mixprec.tmp" for n in range(2)
    )
    new.write_text("{")
    with open(locked, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(locked, (0, 0))
        PLAN.save(path)
        left = {path.name, new.name, locked.name, *names[1:]}
        assert set(os.listdir(folder)) == left
    PLAN.save(path)
    assert set(os.listdir(folder)) == left - {locked.name}
