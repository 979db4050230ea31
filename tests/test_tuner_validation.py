"""A metric on held-back data decides what returns to 16 bits, and signs off."""

import json

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, each_jit
from tuner_models import demoted, done, tuner

import keras_mixprec as kmp
from keras_mixprec.numerics.evaluation import HeldBack
from keras_mixprec.policies import plan_file
from keras_mixprec.tuning import validation

# What takes seconds on torch takes half a minute elsewhere.
slow = pytest.mark.slow if BACKEND != "torch" else lambda test: test

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 4)).astype("float32")
Y = X[:, :1].copy()
DATA = {"validate": (X, Y), "tolerance": 0.05}


class Planted(keras.layers.Dense):
    """Right in training; its inference in float16 is off by 50."""

    def call(self, x, training=False):
        wrong = not training and self.compute_dtype == "float16"
        return super().call(x) + 50.0 * float(wrong)


class OwnTestStep(keras.Model):
    """Its loss, in training and test, is twice what was compiled."""

    def compute_loss(self, *args, **kwargs):
        return 2.0 * super().compute_loss(*args, **kwargs)


def build(jit=BACKEND == "jax", cls=keras.Model, **arguments):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, name="healthy")(inputs)
    x = Planted(8, name="planted")(keras.layers.Dropout(0.1, name="drop")(x))
    model = cls(inputs, keras.layers.Dense(1, name="last")(x))
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1.0),
        loss="mse",
        metrics=["mae"],
        jit_compile=jit,
        **arguments,
    )
    return model


def fit(model, *callbacks, epochs=4, **arguments):
    return model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
        **arguments,
    ).history


def write_demotions(path, *names):
    """The plan of a tuner that has demoted these layers before."""
    model = build()
    plan = dict(kmp.PrecisionPlan.from_model(model))
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


def sign_off(callback):
    return [e for e in callback.history if e["kind"] == "sign_off"]


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    """A run in which one of two layers returns to 16 bits."""
    folder = tmp_path_factory.mktemp("returned")
    model, callback = build(), returning(folder / "plan.json")
    monitor = kmp.MixPrecMonitor(folder / "logs", verbose=0)
    fit(model, monitor, callback)
    return model, callback, monitor, folder


def test_a_layer_worse_in_inference_stays_and_a_healthy_one_returns(returned):
    model, callback, *_ = returned
    assert demoted(model) == {"planted": "float32"}
    kept, *_ = (e for e in callback.history if e["kind"] == "keep")
    assert kept["paths"] == ["planted"]
    assert kept["plan"] > kept["float32"] + 0.2
    (back,) = (e for e in callback.history if e["kind"] == "promote")
    assert back["layers"].keys() == {"healthy"}
    assert back["plan"] == pytest.approx(back["float32"], abs=0.05)
    reason = callback.plan.reasons["planted"]
    assert reason.startswith("it overflowed; kept at step")
    assert "val_loss is" in reason
    assert "tolerance=0.05" in reason


def test_the_sign_off_is_in_history_plan_log_and_summary(returned):
    _, callback, monitor, folder = returned
    entry = callback.history[-1]
    assert (entry["kind"], entry["within"]) == ("sign_off", True)
    saved = json.loads((folder / "plan.json").read_text())["tuner"]["sign_off"]
    assert entry == {"kind": "sign_off", "message": entry["message"], **saved}
    assert saved["metric"] == "val_loss"
    assert saved["step"] == 32
    assert saved["plan"] == pytest.approx(saved["float32"], abs=0.05)
    (run,) = monitor.report.to_dict().values()
    (event,) = (e for e in run["events"] if e["kind"] == "sign_off")
    assert event["message"] == entry["message"]
    summary = str(monitor.summary).replace("\n    ", " ")
    assert entry["message"].capitalize() in summary
    assert "within tolerance=0.05" in run["headline"]["text"]


@each_jit
def test_what_is_to_blame_at_the_end_is_demoted(jit, tmp_path):
    several = {} if BACKEND == "torch" else {"steps_per_execution": 2}
    model = build(jit, **several)
    callback = tuner(tmp_path / "plan.json", **DATA)
    fit(model, callback, epochs=1)
    assert demoted(model) == {"planted": "float32"}
    *_, change, entry = callback.history
    assert change["layers"].keys() == {"planted"}
    assert entry["within"]
    assert entry["to_blame"] == []
    plan = kmp.PrecisionPlan.load(tmp_path / "plan.json")
    assert plan["planted"] == "float32"
    assert plan.reasons["planted"].startswith("in 16 bits val_loss is")
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(entry["plan"])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"dry_run": True}, "'planted'"),
        ({"max_rebuilds": 0}, "'planted'; max_rebuilds=0 is reached"),
        ({"max_demoted_fraction": 0.1}, "max_demoted_fraction=0.1"),
    ],
)
def test_what_is_to_blame_is_named_where_it_may_not_be_demoted(arguments, why):
    model, callback = build(), tuner(**DATA | arguments)
    fit(model, callback, epochs=1)
    entry = callback.history[-1]
    assert (demoted(model), entry["within"]) == ({}, False)
    assert entry["to_blame"] == ["planted"]
    assert entry["message"].endswith(why)


def test_a_function_of_which_more_is_better():
    def score(model):
        return -float(
            np.abs(np.asarray(model.predict(X, verbose=0)) - Y).mean()
        )

    model = build(cls=OwnTestStep)
    fit(model, callback := tuner(validate=score, mode="max", tolerance=0.1))
    assert demoted(model) == {"planted": "float32"}
    assert callback.history[-1]["metric"] == "score"


@pytest.mark.parametrize(
    ("mode", "more", "less"),
    [("min", 1.0, -1.0), ("max", -1.0, 1.0), ("auto", 1.0, 1.0)],
)
def test_which_way_is_the_worse(mode, more, less):
    data = HeldBack(lambda model: 1.0, "val_loss", mode)
    assert data.worse_by(3.0, 2.0) == more
    assert data.worse_by(2.0, 3.0) == less
    assert data.worse_by(np.nan, 2.0) == np.inf


def test_nothing_that_is_trained_is_changed(tmp_path):
    def noisy(model):
        np.random.normal(size=3), keras.random.normal((2,))
        return np.random.normal() + model.evaluate(X, Y, verbose=0)[0]

    def run(**arguments):
        model = build(cls=OwnTestStep)
        path = write_demotions(tmp_path / "plan.json", "healthy")
        callback = tuner(path, promote_after=10, **arguments)
        history = fit(model, callback, epochs=3, validation_data=(X, Y))
        return history, model.get_weights(), done(callback, "promote")

    *plain, steps = run()
    *validated, others = run(validate=noisy, tolerance=1e9)
    assert steps == others != []
    assert plain[0] == validated[0]
    for a, b in zip(plain[1], validated[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("validate", "error", "message"),
    [
        (lambda model: 1 / 0, ZeroDivisionError, "zero"),
        (lambda model: [0.1, 0.2], TypeError, r"return a number.*\[0.1, 0.2\]"),
        (lambda model: None, TypeError, "must return a number.*None"),
        (lambda model: np.nan, ValueError, "In float32 the metric is not fin"),
        (lambda model: -np.inf, ValueError, "In float32 .* validate is -inf"),
    ],
)
def test_a_mistake_in_the_function_ends_fit_at_once(validate, error, message):
    model = build()
    with pytest.raises(error, match=message):
        fit(model, tuner(validate=validate))
    assert int(model.optimizer.iterations) == 0


def test_an_unknown_metric_is_named_at_once():
    with pytest.raises(ValueError, match="'val_loss', 'val_mae'.*'val_f1'"):
        fit(build(), tuner(monitor="f1", **DATA))


def test_a_metric_is_refused_before_the_plan_is_reported(tmp_path, capsys):
    path = write_demotions(tmp_path / "plan.json", "planted")
    with pytest.raises(ValueError, match="`monitor` must be a metric"):
        fit(build(), tuner(path, verbose=1, monitor="val_f1", **DATA))
    assert "starts from" not in capsys.readouterr().out


def test_a_metric_without_data_is_refused_offline():
    with pytest.raises(ValueError, match="pass `validate_fn`. Received: mon"):
        kmp.minimize_float32(build(), X, Y, monitor="val_mae")


@pytest.mark.usefixtures("training_goes_on")
@pytest.mark.parametrize("later", [np.nan, "raises"])
def test_what_fails_later_returns_and_signs_off_nothing(later, tmp_path):
    calls = []

    def validate(model):
        calls.append(1)
        if len(calls) > 1 and later == "raises":
            raise RuntimeError("no disk")
        return later if len(calls) > 1 else 1.0

    callback = returning(tmp_path / "plan.json", validate=validate)
    why = "no disk" if later == "raises" else "is nan in float32 too"
    with pytest.warns(UserWarning, match=f"cannot validate.*{why}"):
        fit(model := build(), callback)
    assert demoted(model).keys() == {"healthy", "planted"}
    assert done(callback, "keep") != []
    (entry,) = sign_off(callback)
    assert not entry["within"]
    assert entry["to_blame"] == []


def test_what_is_over_the_budget_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "_EVALUATIONS", 0)
    fit(model := build(), callback := returning(tmp_path / "plan.json"))
    (entry, *_) = (e for e in callback.history if e["kind"] == "keep")
    assert "validation is over its budget" in entry["message"]
    # The sign-off is made in any case.
    assert demoted(model).keys() == {"healthy", "planted"}
    assert callback.history[-1]["within"]


@slow
def test_it_goes_on_from_the_plan_of_a_run_that_was_killed(tmp_path):
    def kill(batch, logs):
        if done(first, "keep"):
            raise KeyboardInterrupt

    first = returning(tmp_path / "plan.json")
    killer = keras.callbacks.LambdaCallback(on_train_batch_begin=kill)
    with pytest.raises(KeyboardInterrupt):
        fit(build(), first, killer)
    second = tuner(tmp_path / "plan.json", promote_after=10, **DATA)
    fit(model := build(), second)
    assert demoted(model) == {"planted": "float32"}
    assert "; kept at step" in second.plan.reasons["planted"]
    # It waits for twice as long by now.
    assert all(step >= 20 for step in done(second, "keep"))
    assert second.history[-1]["within"]


def test_a_damaged_sign_off_is_refused(tmp_path):
    path = write_demotions(tmp_path / "plan.json", "planted")
    content = json.loads(path.read_text())
    content["tuner"]["sign_off"] = {"within": "yes"}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="damaged.*Received: sign_off="):
        fit(build(), tuner(path))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"validate": 3}, TypeError, "`validate` must be .*Received: .*3"),
        ({"validate": X}, ValueError, "targets are missing"),
        ({"validate": (X,)}, ValueError, "a tuple of 1"),
        ({"validate": {"x": X}}, TypeError, "`validate` must be"),
        ({"validate": iter([(X, Y)])}, ValueError, "read more than once"),
        ({"validate": (X, Y), "mode": "best"}, ValueError, "`mode` must be"),
        ({"validate": (X, Y), "monitor": 1}, TypeError, "`monitor` must be"),
        ({"monitor": "val_mae"}, ValueError, "pass `validate`. Received: mon"),
        ({"mode": "max"}, ValueError, "pass `validate`.*mode='max'"),
        ({"tolerance": -1}, ValueError, "`tolerance` must be"),
        ({"tolerance": "no"}, TypeError, "`tolerance` must be"),
    ],
)
def test_wrong_calls(arguments, error, message):
    with pytest.raises(error, match=message):
        kmp.PrecisionTuner(**arguments)
