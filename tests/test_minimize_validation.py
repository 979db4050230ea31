"""`minimize_float32` with a metric on held-back data, its curve, resuming."""

import json

import keras
import numpy as np
import pytest
from diagnosis_models import Overflowing
from keras import layers
from test_tuner_validation import Planted

import keras_mixprec as kmp

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = X[:, :2].copy()
DATA = {"validate_fn": (X, Y), "validation_tolerance": 0.05}


def build(seed=0):
    """One layer fails in training, one in inference; the others do not."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, name="first"),
            Overflowing(name="overflowing"),
            layers.Dense(8, name="middle"),
            Planted(8, name="planted"),
            layers.Dense(2, name="head"),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


def search(model=None, **arguments):
    model = model or build()
    return kmp.minimize_float32(model, X, Y, rules=[], **arguments)


@pytest.fixture(scope="module")
def plan():
    return search(**DATA)


def wide(plan):
    return {path for path, policy in plan.items() if policy == "float32"}


def test_it_grows_by_what_only_inference_shows(plan):
    assert wide(search()) == {"overflowing"}
    assert wide(plan) == {"overflowing", "planted"}
    why = plan.reasons
    assert why["overflowing"].startswith("in mixed_float16 the loss is not")
    assert why["planted"].startswith("in mixed_float16 val_loss is")
    model = build()
    exact = model.evaluate(X, Y, verbose=0)[0]
    plan.apply(model)
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(exact, abs=0.05)


def at_least_as_good(p, q):
    more = p["share_in_16_bits"] >= q["share_in_16_bits"]
    return more and p["error"] <= q["error"]


def test_the_curve_has_every_trial_and_marks_the_pareto_optimal(plan):
    points = plan.trade_off.to_list()
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
    log_dir = tmp_path / "logs"
    kmp.minimize_float32(build(), X, Y, rules=[], verbose=0, log_dir=log_dir)
    watcher = kmp.MixPrecMonitor(log_dir, verbose=0)
    build().fit(X, Y, 8, verbose=0, callbacks=[watcher])
    lines = (log_dir / "mixprec/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["fit"] for e in events if e["kind"] == "train_begin"] == [1]
    assert "fits" not in watcher.summary.headline["text"]


def test_the_curve_is_plotted(plan, tmp_path):
    pytest.importorskip("matplotlib")
    plan.trade_off.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("calls", [2, 4])
def test_a_search_that_was_killed_goes_on(calls, plan, tmp_path):
    done = []

    def validate(model):
        done.append(1)
        if len(done) == calls:
            raise KeyboardInterrupt
        return model.evaluate(X, Y, verbose=0)[0]

    arguments = {
        **DATA,
        "validate_fn": validate,
        "mode": "min",
        "resume": tmp_path / "trials",
    }
    with pytest.raises(KeyboardInterrupt):
        search(**arguments)
    resumed = search(**arguments)
    whole = done.copy()
    assert dict(resumed) == dict(plan)
    # NaN, of what is not finite, is the same there.
    assert repr([*resumed.trade_off]) == repr([*plan.trade_off])
    # One evaluation is that of float32.
    again = search(**arguments)
    assert (len(done) - len(whole), dict(again)) == (1, dict(plan))


def test_the_trials_of_another_search_are_refused(tmp_path):
    path = tmp_path / "trials.json"
    first = search(resume=path)
    assert dict(search(resume=path, tolerance=0.2)) == dict(first)
    with pytest.raises(ValueError, match="another search: .*the weights"):
        search(build(seed=1), resume=path)
    with pytest.raises(
        ValueError, match="differs in the data.*Received: resume="
    ):
        kmp.minimize_float32(build(), X, Y + 1, rules=[], resume=path)
    with pytest.raises(ValueError, match="differs in `batch_size`"):
        search(resume=path, batch_size=8)
    search(resume=path, **DATA)
    with pytest.raises(ValueError, match="the metric in float32"):
        search(resume=path, validate_fn=lambda model: 9.0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"gradient"', '"other"'),
        lambda text: text.replace("keras_mixprec.trials", "keras_mixprec.plan"),
    ],
)
def test_a_damaged_file_is_refused(damage, tmp_path, written):
    path = tmp_path / "trials.json"
    path.write_text(damage(written))
    with pytest.raises(ValueError, match="damaged.*Received: resume="):
        search(resume=path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("search") / "trials.json"
    search(resume=path)
    assert json.loads(path.read_text())["format"] == "keras_mixprec.trials"
    return path.read_text()


def raises(model):
    raise RuntimeError("no disk")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"validate_fn": raises}, RuntimeError, "no disk"),
        ({"validate_fn": lambda m: np.nan}, ValueError, "metric is not finite"),
        ({"validate_fn": lambda m: "low"}, TypeError, "`validate_fn` must ret"),
        ({"validate_fn": 3}, TypeError, "`validate_fn` must be .*Received"),
        ({"monitor": "f1", **DATA}, ValueError, "one of 'val_loss', 'val_mae'"),
        ({"mode": "up", **DATA}, ValueError, "`mode` must be one of"),
        ({"validation_tolerance": -1}, ValueError, "`validation_tolerance`"),
        ({"resume": 3}, TypeError, "`resume` must be .*Received: resume=3"),
    ],
)
def test_wrong_calls(arguments, error, message):
    with pytest.raises(error, match=message):
        search(**arguments)


def test_no_set_that_is_within_tolerance():
    values = iter([1.0] + [5.0] * 99)
    with pytest.raises(ValueError, match="is 5, in float32 1.*Allow more"):
        search(validate_fn=lambda model: next(values))
