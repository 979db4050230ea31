"""Every layer is found once, under a path that no counter can shift."""

import keras
import pytest
from keras import layers
from policies_models import BUILDERS, INPUT, Subclassed, functional

import keras_mixprec as kmp
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
        ([None, None], ["dense", "dense_1"]),
        (["a", "a", None], ["a", "a_1", "dense"]),
        (["dense", None], ["dense", "dense_1"]),
        (["dense_9", None, "my_dense_5"], ["dense_9", "dense", "my_dense_5"]),
    ],
)
def test_stable_names(names, expected):
    layers.Dense(1)
    assert stable_names([layers.Dense(1, name=n) for n in names]) == expected


def test_counters_rank_the_order_in_which_layers_were_made():
    first, second = layers.Dense(1), layers.Dense(1)
    assert stable_names([second, first]) == ["dense_1", "dense"]


def test_keras_path_gives_the_names_of_this_process():
    layers.Dense(1)
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    entry = walk(keras.Sequential([keras.Input((2,)), inner]))[1]
    assert keras_path(entry) == f"{inner.name}/{inner.layers[0].name}"


# Names that end in a number, by the code or by Keras' counter.


def named(*names):
    parts = [layers.Dense(2, name=name) for name in names]
    return keras.Sequential([keras.Input((2,)), *parts])


# What the process has made before: another model, with names or without.
BEFORE = {
    "nothing": lambda: None,
    "one layer": lambda: layers.Dense(1),
    "more layers": lambda: [layers.Dense(1) for _ in range(9)],
    "the same names, given": lambda: walk(named("dense_1", "dense_2")),
    "the same names, by Keras": lambda: [walk(named(None, None, None))],
}


@pytest.fixture(params=BEFORE)
def before(request):
    keras.backend.clear_session()
    BEFORE[request.param]()


@pytest.mark.parametrize(
    "names",
    [("dense_1", "dense_2"), ("dense_0", "dense_1"), ("dense_7", "dense_2")],
)
def test_names_that_the_code_gives_stay(before, names):
    # As of a loop, and not as of a constant.
    model = named(*(f"dense_{int(n[-1])}" for n in names))
    assert paths(model) == [*names]
    for _ in range(5):
        layers.Dense(1)  # Keras' counter passes them.
    assert paths(model) == paths(keras.models.clone_model(model)) == [*names]


def test_counters_of_keras_do_not(before, tmp_path):
    model = named(None, None)
    model.save(tmp_path / "m.keras")
    copies = [
        keras.models.clone_model(model),
        keras.models.model_from_json(model.to_json()),
        keras.models.load_model(tmp_path / "m.keras"),
    ]
    for copy in (model, *copies, *map(keras.models.clone_model, copies)):
        assert paths(copy) == ["dense", "dense_1"]


def test_a_plan_fits_whether_names_were_known_to_be_given():
    model = named("dense_1", "dense_3")
    rules = [kmp.PrecisionRule("dense_3")]
    plan = kmp.apply_policy(model, "mixed_float16", rules=rules)
    loaded = keras.models.model_from_json(model.to_json())
    for again in (loaded, named("dense_1", "dense_3")):
        plan.apply(again)
        dtypes = [layer.compute_dtype for layer in again.layers]
        assert dtypes == ["float16", "float32"]
    kmp.PrecisionPlan.from_model(loaded).apply(named("dense_1", "dense_3"))


def test_a_rule_for_keras_name_says_what_the_path_is():
    keras.backend.clear_session()
    for _ in range(3):
        layers.Dense(1)
    with pytest.warns(UserWarning, match="its path is 'dense_1'"):
        kmp.apply_policy(
            named(None, None),
            "mixed_float16",
            rules=[kmp.PrecisionRule("dense_4")],
        )
