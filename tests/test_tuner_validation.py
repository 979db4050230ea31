"""A metric on held-back data decides which layers return to 16 bits."""

import json

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, each_jit, monitor
from tuner_models import compiled, demoted, done, entries, tuner

import keras_mixprec as kmp
from keras_mixprec.policies import plan_file

pytestmark = pytest.mark.long

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 4)).astype("float32")
Y = X[:, :1].copy()
DATA = {"validate": (X, Y), "tolerance": 0.05}

one_backend = pytest.mark.one_backend


class Planted(keras.layers.Dense):
    """Right in training; its inference in float16 is off by 50."""

    def call(self, x, training=False):
        wrong = not training and self.compute_dtype == "float16"
        return super().call(x) + 50.0 * float(wrong)


def build(**arguments):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, name="healthy")(inputs)
    x = Planted(8, name="planted")(keras.layers.Dropout(0.1, name="drop")(x))
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(x))
    options = {"momentum": 0.0, "loss": "mse", "metrics": ["mae"]}
    return compiled(model, 0.01, **options | arguments)


def fit(model, *callbacks, epochs=4, **arguments):
    options = {"batch_size": 4, "verbose": 0, "callbacks": [*callbacks]}
    return model.fit(X, Y, epochs=epochs, **options | arguments).history


def write_demotions(path, *names):
    """The plan of a tuner that has demoted these layers before."""
    plan = dict(kmp.PrecisionPlan.from_model(build()))
    fields = {"before": "mixed_float16", "policy": "float32", "step": 0}
    fields |= {"kind": "forward_overflow", "reason": "it overflowed"}
    state = {
        "demotions": dict.fromkeys(names, fields),
        "tries": dict.fromkeys(names, 1),
        "rebuilds": 1,
    }
    plan = kmp.PrecisionPlan(plan | dict.fromkeys(names, "float32"))
    plan_file.write(path, plan, state)
    return path


def returning(path, **arguments):
    write_demotions(path, "healthy", "planted")
    return tuner(path, **{"promote_after": 10, **DATA} | arguments)


def test_a_layer_worse_in_inference_stays_and_a_healthy_one_returns(tmp_path):
    model, callback = build(), returning(tmp_path / "plan.json")
    fit(model, watcher := monitor(tmp_path / "logs"), callback)
    assert demoted(model) == {"planted": "float32"}
    kept, *_ = entries(callback, "keep")
    assert kept["paths"] == ["planted"]
    assert kept["plan"] > kept["float32"] + 0.2
    (back,) = entries(callback, "promote")
    assert back["layers"].keys() == {"healthy"}
    assert back["plan"] == pytest.approx(back["float32"], abs=0.05)
    reason = callback.plan.reasons["planted"]
    assert reason.startswith("it overflowed; kept")
    assert "val_loss" in reason
    assert "tolerance=0.05" in reason
    # The sign-off is in history, plan, log and summary.
    entry = callback.history[-1]
    assert (entry["kind"], entry["within"]) == ("sign_off", True)
    content = json.loads((tmp_path / "plan.json").read_text())
    saved = content["tuner"]["sign_off"]
    assert entry == {"kind": "sign_off", "message": entry["message"], **saved}
    assert (saved["metric"], saved["step"]) == ("val_loss", 32)
    assert saved["plan"] == pytest.approx(saved["float32"], abs=0.05)
    (run,) = watcher.report.to_dict().values()
    (event,) = (e for e in run["events"] if e["kind"] == "sign_off")
    assert event["message"] == entry["message"]
    summary = str(watcher.summary).replace("\n    ", " ")
    assert entry["message"].capitalize() in summary
    assert "within tolerance=0.05" in run["headline"]["text"]


@each_jit
def test_what_is_to_blame_at_the_end_is_demoted(jit, tmp_path):
    several = {} if BACKEND == "torch" else {"steps_per_execution": 2}
    model = build(jit=jit, **several)
    callback = tuner(tmp_path / "plan.json", **DATA)
    fit(model, callback, epochs=1)
    assert demoted(model) == {"planted": "float32"}
    *_, change, entry = callback.history
    assert change["layers"].keys() == {"planted"}
    assert entry["within"]
    assert entry["to_blame"] == []
    plan = kmp.PrecisionPlan.load(tmp_path / "plan.json")
    assert plan["planted"] == "float32"
    assert "val_loss" in plan.reasons["planted"]
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(entry["plan"])


@one_backend
@pytest.mark.parametrize(
    ("arguments", "obstacle"),
    [
        ({"dry_run": True}, "because of"),
        ({"max_rebuilds": 0}, "max_rebuilds=0"),
        ({"max_demoted_fraction": 0.1}, "max_demoted_fraction=0.1"),
    ],
)
def test_what_is_to_blame_is_named_where_it_may_not_be_demoted(
    arguments, obstacle
):
    model, callback = build(), tuner(**DATA | arguments)
    fit(model, callback, epochs=1)
    entry = callback.history[-1]
    assert (demoted(model), entry["within"]) == ({}, False)
    assert entry["to_blame"] == ["planted"]
    for name in "'planted'", obstacle:
        assert name in entry["message"]


def test_a_function_of_which_more_is_better():
    def score(model):
        found = np.asarray(model.predict(X, verbose=0))
        return -float(np.abs(found - Y).mean())

    model = build()
    fit(model, callback := tuner(validate=score, mode="max", tolerance=0.1))
    assert demoted(model) == {"planted": "float32"}
    assert callback.history[-1]["metric"] == "score"


def test_nothing_that_is_trained_is_changed(tmp_path):
    def noisy(model):
        np.random.normal(size=3), keras.random.normal((2,))
        return np.random.normal() + model.evaluate(X, Y, verbose=0)[0]

    def run(**arguments):
        model = build()
        path = write_demotions(tmp_path / "plan.json", "healthy")
        callback = tuner(path, promote_after=10, **arguments)
        history = fit(model, callback, epochs=3, validation_data=(X, Y))
        return history, model.get_weights(), entries(callback, "promote")

    *plain, returned = run()
    *validated, others = run(validate=noisy, tolerance=1e9)
    assert [e["step"] for e in returned] == [e["step"] for e in others] != []
    assert plain[0] == validated[0]
    for a, b in zip(plain[1], validated[1], strict=True):
        np.testing.assert_array_equal(a, b)


@one_backend
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"validate": lambda m: 1 / 0}, ZeroDivisionError, "zero"),
        ({"validate": lambda m: [0.1, 0.2]}, TypeError, r"\[0.1, 0.2\]"),
        ({"validate": lambda m: np.nan}, ValueError, "float32.*nan"),
        (DATA | {"monitor": "f1"}, ValueError, "'val_loss', 'val_mae'.*_f1"),
    ],
)
def test_a_mistake_ends_fit_before_anything_is_said(
    arguments, error, message, tmp_path, capsys
):
    path, model = write_demotions(tmp_path / "plan.json", "planted"), build()
    with pytest.raises(error, match=message):
        fit(model, tuner(path, verbose=1, **arguments))
    assert int(model.optimizer.iterations) == 0
    assert capsys.readouterr().out == ""


@one_backend
@pytest.mark.usefixtures("training_goes_on")
def test_what_fails_later_returns_and_signs_off_nothing(tmp_path):
    numbers = iter([1.0])

    def validate(model):
        return next(numbers, np.nan)

    callback = returning(tmp_path / "plan.json", validate=validate)
    with pytest.warns(UserWarning, match="cannot validate.*nan"):
        fit(model := build(), callback)
    assert demoted(model).keys() == {"healthy", "planted"}
    assert "keep" in dict(done(callback))
    (entry,) = entries(callback, "sign_off")
    assert not entry["within"]
    assert entry["to_blame"] == []
