"""Runs with errors, and errors in a part of the monitor.

A run that raises or cannot be repaired ends with the reason. It continues if
the disk or a part of the monitor fails.
"""

import math
import warnings

import keras
import numpy as np
import pytest
from full_disk import full, small_disk
from keras import layers
from monitor_models import (
    BAD,
    DEFAULTS,
    Squares,
    arrays,
    dense,
    each_jit,
    every_backend,
    fit,
    good,
    monitor,
    one_backend,
    one_weight,
    overview,
    prose,
    scalars,
    told,
    watched,
    with_bad,
)
from tuner_models import chain, tuner

import keras_mixprec as kmp
from keras_mixprec.diagnosis.failing_batch import FailingBatch
from keras_mixprec.loss_scaling.rules import PRESETS

pytestmark = one_backend

# Runs that end early because nothing helps.


def following(name):
    """Wraps an optimizer in Keras' own, ours, or ours with a preset's rule."""

    def wrap(inner, initial_scale=2.0**15):
        if name in PRESETS:
            rule = kmp.DynamicLossScale.preset(name)
            return kmp.LossScaleOptimizer(inner, rule)
        kind = kmp if name == "ours" else keras.optimizers
        return kind.LossScaleOptimizer(inner, initial_scale=initial_scale)

    return wrap


# The counters are read at the end only.
@pytest.mark.parametrize(
    ("name", "steps"),
    [("own", 100), ("torch", 100), ("torch", 18), ("deepspeed", 100)],
)
def test_the_cause_of_a_collapse_is_found_under_every_rule(
    name, steps, tmp_path
):
    model, values = chain(wrap=following(name)), [1000.0] * steps
    run = watched(tmp_path, values, model, update_freq=1000)
    assert run.summary.optimizers[""].skipped == steps
    kinds = [verdict.kind for verdict in run.verdicts]
    assert kinds[0] in ("forward_overflow", "backward_overflow")
    assert "scale_collapsed" not in kinds


def at_the_floor(inner):
    rule = kmp.DynamicLossScale(2.0, min_scale=1.0)
    return kmp.LossScaleOptimizer(inner, rule)


@pytest.mark.parametrize(
    ("wrap", "stop_after", "reason"),
    [
        (following("ours"), 3, "3 steps"),
        (lambda inner: following("own")(inner, 1.0), 3, "3 steps"),
        # A rule without a floor, and one with.
        (following("torch"), 3, "3 steps"),
        (at_the_floor, 8, "loss scale of 1"),
    ],
)
def test_it_stops_whatever_the_scale(
    wrap, stop_after, reason, tmp_path, capsys
):
    often = {"update_freq": 1, "stop_after": stop_after, "verbose": 1}
    values = [*good(2), *[BAD] * 30]
    run = watched(tmp_path, values, one_weight(wrap), **often)
    assert run.summary.optimizers[""].steps < 14
    (event,) = run.told("stopped")
    assert reason in event["reason"]
    assert event["reason"] in capsys.readouterr().out
    # The cause, not the collapse that it brings about.
    assert "scale_collapsed" not in [v.kind for v in run.verdicts]


def test_a_backup_outlives_a_run_that_raises(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    watcher = monitor(tmp_path, stop_after=5, on_stop="raise", update_freq=2)
    ours = [tuner(dry_run=True), watcher]
    model, ends = one_weight(), []
    other = keras.callbacks.LambdaCallback(on_train_end=ends.append)
    values = [*good(8), *[BAD] * 24]
    with pytest.raises(FloatingPointError, match="in a row"):
        fit(model, values, [backup, *ours, other], epochs=4)
    assert not ends
    assert any((tmp_path / "backup").iterdir())
    assert watcher.summary.optimizers[""].steps == 13
    assert told(tmp_path, "train_end")
    assert max(scalars(tmp_path, "loss_scale")) == 13
    # It goes on with the epoch after the one that is in the backup.
    again = fit(model, good(32), [backup, monitor(tmp_path)], epochs=4)
    assert len(again["loss"]) == 3


def test_a_failure_seen_at_the_end_is_raised_then(tmp_path):
    watcher = monitor(tmp_path, stop_after=5, on_stop="raise", max_overhead=0)
    with pytest.raises(FloatingPointError, match="5 steps"):
        fit(one_weight(), [BAD] * 5, [watcher])
    assert watcher.summary.optimizers[""].skipped == 5


@pytest.mark.parametrize(
    ("seconds", "epochs"),
    [(0.0, 1), pytest.param(3600.0, 8, marks=every_backend), (0.0, 8)],
)
def test_it_stops_at_the_very_step_on_any_machine(
    seconds, epochs, tmp_path, clock
):
    # Its only epoch, or epochs of eight steps.
    values, options = [*good(6), *[BAD] * 58], {"epochs": epochs} | DEFAULTS
    with clock.each_look_takes(seconds):
        run = watched(tmp_path, values, None, stop_after=20, **options)
    # Keras ends an epoch after the step that has begun.
    assert run.summary.optimizers[""].skipped in (20, 21)


# Runs that an exception ends.


class Raises(keras.callbacks.Callback):
    def __init__(self, error, batch):
        super().__init__()
        self.error, self.batch = error, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise self.error


def ended(folder, model, error, *callbacks):
    """The monitor of a run that raises, and what its log says of it."""
    watcher = monitor(folder, verbose=1)
    with pytest.raises(error):
        fit(model, good(4), [watcher, *callbacks])
    return watcher, overview(folder)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("batch", [0, 2])
def test_an_exception_is_in_all_that_is_said(tmp_path, capsys, policy, batch):
    model = dense(inputs=1, policy=policy)
    raises = Raises(OSError("disk full"), batch)
    watcher, run = ended(tmp_path, model, OSError, raises)
    assert run["headline"]["state"] == "failing"
    finding = run["events"][run["finding"]["event"]]
    assert (finding["kind"], finding["level"]) == ("fit_raised", "bad")
    assert finding["step"] == batch
    assert f"step {batch + 1}:" in run["headline"]["text"]
    printed = capsys.readouterr().out
    for place in watcher.report, printed, watcher.summary:
        assert "OSError: disk full" in prose(place)
        assert "no findings" not in prose(place)
    # A later fit has its own state.
    later = watched(tmp_path, good(2), model).overview()
    assert later["headline"]["state"] != "failing"


def test_what_was_interrupted_does_not_fail(tmp_path):
    stops = Raises(KeyboardInterrupt(), 2)
    model = dense(inputs=1, policy="float32")
    _, run = ended(tmp_path, model, KeyboardInterrupt, stops)
    assert run["headline"]["state"] == "healthy"
    assert "interrupted in step 3" in prose(kmp.load_report(tmp_path))


# Batches of skipped steps, which are kept to fail again.

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
X[16:24] *= 300.0  # The third of six batches.


def model_with_squares():
    keras.utils.set_random_seed(1)
    middle = Squares(name="squares"), layers.Dropout(0.2)
    return dense(*middle, optimizer="adam")


@every_backend
def test_a_batch_that_is_loaded_fails_alike(tmp_path):
    data, keep = (X, X[:, :1]), {"keep_failing_batches": 3, "batch_size": 8}
    run = watched(tmp_path, data, model_with_squares(), epochs=2, **keep)
    batches = run.watcher.failing_batches
    assert [b.step for b in batches] == [3, 9]
    np.testing.assert_array_equal(batches[0].batch[0], X[16:24])
    batches[0].save(tmp_path / "batch.npz")
    loaded = FailingBatch.load(tmp_path / "batch.npz")
    first, again = (
        [v.to_dict() for v in batch.replay(model_with_squares())]
        for batch in (batches[0], loaded)
    )
    assert first == again
    found = [first[0][key] for key in ("kind", "layer", "step")]
    assert found == ["forward_overflow", "squares", 3]


@pytest.mark.long
@each_jit
def test_training_is_the_same_and_the_first_are_kept(tmp_path, jit):
    values = with_bad(good(8), 2, 3, 6)
    keeping, other = (
        watched(
            tmp_path / str(n), values, one_weight(jit=jit), epochs=2, **kept
        )
        for n, kept in enumerate(({"keep_failing_batches": 2}, {}))
    )
    assert keeping.history["loss"] == other.history["loss"]
    assert other.watcher.failing_batches == []
    batches = keeping.watcher.failing_batches
    assert [b.step for b in batches] == [3, 4]
    scales = [b.scales["optimizer"] for b in batches]
    assert scales == [2.0**15, 2.0**14]
    assert (batches[0].batch[0] == np.float32(BAD)).all()
    assert batches[0].plan == {"dense": "mixed_float16"}


# A disk that fails in between.

STEPS = 10


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as folder:
        yield folder


@pytest.mark.long
@every_backend
def test_a_disk_that_fails_ends_nothing(disk, tmp_path):
    values, options = with_bad(good(STEPS), 3) * 3, {"update_freq": 1}
    options["epochs"] = 3
    filled = full(disk)

    def change(epoch, logs=None):
        if epoch == 1:
            filled.__enter__()
        elif epoch == 2:
            filled.__exit__(None, None, None)

    changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    with pytest.warns(UserWarning, match="not be written") as warned:
        run = watched(disk, values, None, changing, **options)
    # Keras and NumPy have others, of their own.
    messages = [str(w.message) for w in warned if w.category is UserWarning]
    [line] = [message for message in messages if "written" in message]
    assert "\n" not in line
    assert run.history == watched(tmp_path / "b", values, epochs=3).history
    assert [*run.scalars("loss_scale")] == [*range(3 * STEPS + 1)]
    [gap] = run.told("log_gap")
    assert run.told("train_end")
    skipped = [e["at_step"] for e in run.told("skipped_step")]
    assert skipped == [4, STEPS + 4, 2 * STEPS + 4]
    assert gap["lost"] == 0
    assert STEPS <= gap["from_step"] < gap["step"] <= 2 * STEPS + 1
    assert "No space left" in gap["reason"]


# A `fit` that does not start, after which others are watched.


class NotYet(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise ValueError("not yet")


@pytest.mark.parametrize(
    ("other", "match"),
    [(NotYet(), "not yet"), (kmp.MixPrecMonitor("b"), "one `MixPrecMonitor`")],
)
def test_a_fit_that_does_not_start(other, match, tmp_path):
    model, watcher = one_weight(), monitor(tmp_path)
    with pytest.raises(ValueError, match=match):
        fit(model, good(2), [watcher, other])
    assert fit(model, [1 / 8], []) == {"loss": [1 / 64]}
    run = watched(tmp_path, [BAD, 1 / 8], model)
    assert run.history == {"loss": [1 / 64]}
    assert len(run.told("skipped_step")) == 1
    assert model.evaluate(*arrays([1 / 8]), verbose=0) == 1 / 64


# Values of the wrong type and wrong values, for each argument.
WRONG = {
    "update_freq": ([1.5, "x", True], [0, -1]),
    "on_stop": ([], ["explode"]),
    "keep_failing_batches": ([0.5], [-1]),
    "max_overhead": (["x", None], [-1, 2, math.nan]),
    "log_dir": ([5, None], ["gs://bucket/x"]),
    "loggers": (["wandb", {}], []),
    "lint": ([True, []], []),
    "doctor": (["quick"], []),
}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        (name, value, error)
        for name, kinds in WRONG.items()
        for error, values in zip((TypeError, ValueError), kinds, strict=True)
        for value in values
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_given(name, value, error):
    with pytest.raises(error, match=f"`?{name}`? must be") as caught:
        kmp.MixPrecMonitor(**{name: value})
    assert f"Received: {name}={value!r}" in str(caught.value)


# Parts of the monitor that fail.


PARTS = {
    "read the counters": "monitoring.counters.Counters.nonfinite_curves",
    "time steps": "monitoring.speed.StepClock.go_on",
    "log layers": "callbacks.watch.LayerLog.write",
    "look at metrics": "monitoring.metric_values.MetricValues.read",
    "measure layers": "monitoring.range_log.RangeLog.finish",
    "sum up this run": "monitoring.summary.summarize",
    "tune this model": "tuning.controller.Tuning._look",
}


@pytest.mark.usefixtures("training_goes_on")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_is_named_once_and_training_goes_on(
    part, tmp_path, monkeypatch
):
    def broken(*args, **kwargs):
        raise RuntimeError("it is broken")

    monkeypatch.setattr(f"keras_mixprec.{PARTS[part]}", broken)
    options = {"epochs": 2, "update_freq": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = watched(tmp_path, good(12), None, tuner(), **options)
    assert len(run.history["loss"]) == 2
    (said,) = {str(w.message) for w in caught if "broken" in str(w.message)}
    assert f"cannot {part}" in said
    (event,) = run.told("task_failed")
    assert event["task"] == part
