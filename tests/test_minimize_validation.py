"""`minimize_float32` with a metric on held-back data, its curve, resuming."""

import json

import keras
import numpy as np
import pytest
from diagnosis_models import Overflowing
from keras import layers
from test_tuner_validation import Planted

import keras_mixprec as kmp

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value) encountered:RuntimeWarning"
    ),
]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = X[:, :2].copy()
DATA = {"validate_fn": (X, Y), "validation_tolerance": 0.05}


def build(seed=0):
    """One layer fails in training, one in inference; the others do not."""
    keras.utils.set_random_seed(seed)
    first = layers.Dense(8, name="first"), Overflowing(name="overflowing")
    middle = layers.Dense(8, name="middle"), Planted(8, name="planted")
    head = layers.Dense(2, name="head")
    model = keras.Sequential([keras.Input((8,)), *first, *middle, head])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


def search(model=None, y=Y, **arguments):
    model = model or build()
    return kmp.minimize_float32(model, X, y, rules=[], **arguments)


@pytest.fixture(scope="module")
def searches(tmp_path_factory):
    """Returns the plans with and without held-back data, and the file."""
    path = tmp_path_factory.mktemp("search") / "trials.json"
    return search(**DATA), search(resume=path), path.read_text()


@pytest.fixture
def plan(searches):
    return searches[0]


def wide(plan):
    return {path for path, policy in plan.items() if policy == "float32"}


def test_it_grows_by_what_only_inference_shows(plan, searches):
    assert wide(searches[1]) == {"overflowing"}
    assert wide(plan) == {"overflowing", "planted"}
    assert "loss is not" in plan.reasons["overflowing"]
    assert "val_loss" in plan.reasons["planted"]
    model = build()
    exact = model.evaluate(X, Y, verbose=0)[0]
    plan.apply(model)
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(exact, abs=0.05)


def at_least_as_good(p, q):
    more = p["share_in_16_bits"] >= q["share_in_16_bits"]
    return more and p["error"] <= q["error"]


def test_the_curve_has_every_trial_and_marks_the_pareto_optimal(plan):
    points = [*plan.trade_off]
    assert all(0 <= p["share_in_16_bits"] <= 1 for p in points)
    assert [] in [p["float32"] for p in points]
    assert points[-1]["error"] == points[-1]["share_in_16_bits"] == 0
    (found,) = (p for p in points if {*p["float32"]} == wide(plan))
    assert found["error"] <= 0.05
    known = [p for p in points if p["error"] is not None]
    for p in known:
        alike = [q for q in known if q is not p and at_least_as_good(q, p)]
        better = [q for q in alike if not at_least_as_good(p, q)]
        assert not better if p["pareto_optimal"] else alike
    assert plan.trade_off.pareto() == [p for p in points if p["pareto_optimal"]]
    assert "planted" in str(plan.trade_off)


def test_a_search_that_is_logged_is_no_call_of_fit(tmp_path):
    search(verbose=0, log_dir=tmp_path)
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    build().fit(X, Y, 8, verbose=0, callbacks=[watcher])
    lines = (tmp_path / "mixprec/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["fit"] for e in events if e["kind"] == "train_begin"] == [1]
    assert "fits" not in watcher.summary.headline["text"]


def test_a_search_that_was_killed_goes_on(plan, tmp_path):
    done = []

    def validate(model):
        done.append(1)
        if len(done) == 4:
            raise KeyboardInterrupt
        return model.evaluate(X, Y, verbose=0)[0]

    arguments = {**DATA, "validate_fn": validate, "mode": "min"}
    arguments |= {"resume": tmp_path / "trials"}
    with pytest.raises(KeyboardInterrupt):
        search(**arguments)
    resumed = search(**arguments)
    whole = done.copy()
    assert dict(resumed) == dict(plan)
    # NaN, of what is not finite, is the same there.
    assert repr([*resumed.trade_off]) == repr([*plan.trade_off])
    # One of the evaluations is in float32.
    again = search(**arguments)
    assert (len(done) - len(whole), dict(again)) == (1, dict(plan))


def test_the_trials_of_another_search_are_refused(
    searches, tmp_path, another_device
):
    path = tmp_path / "trials.json"
    path.write_text(searches[2])
    assert dict(search(resume=path, tolerance=0.2)) == dict(searches[1])
    for differs, arguments in {
        "the weights": {"model": build(seed=1)},
        "the data": {"y": Y + 1},
        "`batch_size`": {"batch_size": 8},
    }.items():
        message = f"differs in {differs}.*Received: resume="
        with pytest.raises(ValueError, match=message):
            search(resume=path, **arguments)
    search(resume=path, **DATA)
    with pytest.raises(ValueError, match="the metric in"):
        search(resume=path, validate_fn=lambda model: 9.0)
    another_device()
    with pytest.raises(ValueError, match="differs in device"):
        search(resume=path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: text.replace('"found"', '"other"'),
    ],
)
def test_a_damaged_file_is_refused(damage, searches, tmp_path):
    path = tmp_path / "trials.json"
    path.write_text(damage(searches[2]))
    assert json.loads(searches[2])["format"] == "keras_mixprec.trials"
    with pytest.raises(ValueError, match="damaged.*Received: resume="):
        search(resume=path)


def raises(model):
    raise RuntimeError("no disk")


def another_each_time(values=iter([1.0] + [5.0] * 99)):  # noqa: B008
    return lambda model: next(values)


WRONG = {
    "no disk": {"validate_fn": raises},
    "`validate_fn` must return": {"validate_fn": lambda model: "low"},
    "`validate_fn` must be .*Received": {"validate_fn": 3},
    "one of 'val_loss', 'val_mae'": {"monitor": "f1", **DATA},
    "is 5, .* 1.*Raise": {"validate_fn": another_each_time()},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls(message):
    errors = RuntimeError, TypeError, ValueError
    with pytest.raises(errors, match=message):
        search(**WRONG[message])
