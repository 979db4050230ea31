"""Plans: every layer once, under a path that lasts, and the file of a plan."""

import json
import os
import time

import keras
import numpy as np
import pytest
from keras import layers
from policies_models import BUILDERS, INPUT, Subclassed, functional

import keras_mixprec as kmp
from keras_mixprec import PrecisionPlan, PrecisionRule
from keras_mixprec.policies.layers import keras_path, stable_names, walk

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


class Holder(keras.Model):
    """Has more than layers."""

    def __init__(self):
        super().__init__()
        self.metric = keras.metrics.Mean()
        self.optimizer_kept = keras.optimizers.SGD()
        self.seed = keras.random.SeedGenerator(0)
        self.dense = layers.Dense(1)


def test_paths_can_be_read():
    parts = ["", "/query", "/key", "/value", "/softmax", "/dropout"]
    attention = [f"multi_head_attention{part}" for part in parts]
    assert paths(functional())[:6] == attention
    assert paths(Holder()) == ["dense"]
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


def test_building_adds_layers_and_moves_none():
    model = Subclassed()
    before = paths(model)
    model(INPUT)
    after = paths(model)
    assert [path for path in after if path in before] == before
    assert "late_block/block/dense" in after


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([None, None], ["dense", "dense_1"]),
        (["a", "a", None], ["a", "a_1", "dense"]),
        (["dense", None], ["dense", "dense_1"]),
        (["dense_9", None, "my_dense_5"], ["dense_9", "dense", "my_dense_5"]),
    ],
)
def test_stable_names(names, expected):
    layers.Dense(1)
    made = [layers.Dense(1, name=name) for name in names]
    assert stable_names(made) == expected
    # Counters rank the order in which layers were made.
    first, second = layers.Dense(1), layers.Dense(1)
    assert stable_names([second, first]) == ["dense_1", "dense"]


# What the process has made before: another model, with names or without.
BEFORE = {
    "nothing": lambda: None,
    "one layer": lambda: layers.Dense(1),
    "more layers": lambda: [layers.Dense(1) for _ in range(9)],
    "names given": lambda: walk(named("dense_1", "dense_2")),
    "names by Keras": lambda: [walk(named(None, None, None))],
}


@pytest.mark.parametrize("before", BEFORE)
def test_names_that_end_in_a_number(before, tmp_path):
    for names in (
        ["dense_1", "dense_2"],
        ["dense_0", "dense_1"],
        ["dense_7", "dense_2"],
    ):
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


def test_a_layer_is_made_by_a_function_of_arrays():
    def build(data):
        return layers.Dense(1, name="of_data_1")

    data = np.ones((2, 2)), np.ones((2, 1))
    assert stable_names([build(data)]) == ["of_data_1"]


def test_a_plan_fits_whether_names_were_known_to_be_given():
    model = named("dense_1", "dense_3")
    rules = [PrecisionRule("dense_3")]
    plan = kmp.apply_policy(model, "mixed_float16", rules=rules)
    loaded = keras.models.model_from_json(model.to_json())
    for again in (loaded, named("dense_1", "dense_3")):
        plan.apply(again)
        dtypes = [layer.compute_dtype for layer in again.layers]
        assert dtypes == ["float16", "float32"]
    PrecisionPlan.from_model(loaded).apply(named("dense_1", "dense_3"))


def test_keras_own_name_is_recognized():
    keras.backend.clear_session()
    for _ in range(3):
        layers.Dense(1)
    inner = named(None, None)
    entry = walk(keras.Sequential([keras.Input((2,)), inner]))[2]
    assert keras_path(entry) == f"{inner.name}/dense_4"
    with pytest.raises(ValueError, match="'dense_4'.*'dense_1'"):
        PrecisionPlan({"dense_4": "float32"}).validate(inner)
    rules = [PrecisionRule("dense_4")]
    with pytest.warns(UserWarning, match="'dense_4'.*'dense_1'"):
        kmp.apply_policy(inner, "mixed_float16", rules=rules)


def test_a_plan_is_a_mapping_in_model_order():
    plan = PrecisionPlan.from_model(functional())
    assert list(plan)[0] == "multi_head_attention"
    assert list(plan)[-1] == "softmax"
    assert plan["logits"] == plan.default == "float32"
    assert dict(plan) == plan
    assert len(plan) == len(list(plan))
    rule = PrecisionRule("b", reason="targets reach 1e5")
    plan = kmp.apply_policy(named("a", "b"), "mixed_bfloat16", rules=[rule])
    assert plan.reasons == {"b": "targets reach 1e5"}
    assert plan.apply(named("a", "b")).reasons == plan.reasons


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
    [
        (A, "'b'"),
        (A | B | {"bb": "float32"}, "'bb'.*'b'"),
        (A | {"b": "int8_from_float32"}, "int8_from_float32.*'b'"),
    ],
    ids=["missing", "unknown", "quantized"],
)
def test_a_plan_for_another_model_is_refused(policies, names):
    model = named("a", "b")
    with pytest.raises(ValueError, match=names):
        PrecisionPlan(policies).apply(model)
    assert PrecisionPlan.from_model(model)["a"] == "float32"


def test_an_ambiguous_path_lists_what_it_could_be():
    both = keras.Sequential([named("d"), named("d")])
    with pytest.raises(ValueError, match="ambiguous.*'sequential"):
        PrecisionPlan({"d": "float32"}).validate(both)


def test_text_fits_a_screen_and_names_what_differs():
    names = [f"layer_{chr(97 + i // 8)}{chr(97 + i % 8)}" for i in range(64)]
    plan = PrecisionPlan(dict.fromkeys(names, "float16"))
    assert repr(plan) == "<PrecisionPlan of 64 layers: 64 float16>"
    assert len(str(plan).splitlines()) == 32
    assert "34 more" in str(plan)
    assert "layer_aa" in str(plan)
    # One without other layers announces none.
    assert str(PrecisionPlan.from_model(named("a"))).endswith("all float32")


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
        ("", "not JSON"),
        (written()[:-20], "damaged"),
        ("[]", "`format`"),
        (written(format="other"), "`format`"),
        (written(version=2), "newer.*version=2"),
        (written(version="1"), "`version`"),
        (written(version=True), "`version`"),
        (written(default=3), "`default`"),
        (written(default="x"), "not know"),
        ("[" * 100_000, "not JSON"),
        (written(default="\ud800"), "not JSON"),
        (written(layers={}), "`layers`"),
        (written(layers=["a"]), "`path` and `policy`"),
        (written(layers=[{"path": "a"}]), "`path` and `policy`"),
        (written(layers=[ENTRY | {"path": 1}]), "as strings"),
        (written(layers=[ENTRY | {"policy": "x"}]), "not know"),
        (written(layers=2 * [ENTRY]), "twice"),
    ],
)
def test_a_damaged_file_is_refused(text, message, path):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        PrecisionPlan.load(path)


def test_files_that_are_missing_or_have_more_to_say(path):
    with pytest.raises(FileNotFoundError, match="plan.json"):
        PrecisionPlan.load(path)
    path.write_text(written(created_by="someone"))
    assert PrecisionPlan.load(path) == {"a": "float32"}


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "plan.json", tmp_path / "link.json"
    link.symlink_to(target)
    for _ in range(2):  # At first it leads nowhere.
        PLAN.save(link)
        assert link.is_symlink()
        assert_holds_the_plan_alone(target)
    assert sorted(os.listdir(tmp_path)) == ["link.json", "real"]


def test_permissions(path):
    other = path.with_name("other")
    other.touch()
    PLAN.save(path)
    # A new one has those of any new file, an old one keeps its own.
    assert path.stat().st_mode == other.stat().st_mode
    for mode in (0o600, 0o644, 0o664):
        path.chmod(mode)
        PLAN.save(path)
        assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_neither_read_nor_replaced(path, make):
    make(path)
    kind = path.stat().st_mode
    with pytest.raises(ValueError, match="Not a regular"):
        PrecisionPlan.load(path)
    with pytest.raises(OSError, match="Not a regular"):
        PLAN.save(path)
    assert path.stat().st_mode == kind
    assert os.listdir(path.parent) == [path.name]


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
