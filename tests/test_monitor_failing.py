"""What becomes of a run in which something fails, and of the monitor's parts.

A run that raises or cannot be helped ends with the reason; a disk that fails,
and a part of the monitor that does, end nothing.
"""

import math
import shutil
import warnings

import keras
import numpy as np
import pytest
from full_disk import full, small_disk
from keras import layers
from monitor_models import (
    BACKEND,
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
    not_jax,
    not_torch,
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
from keras_mixprec.diagnosis.examination import Examination
from keras_mixprec.diagnosis.failing_batch import FailingBatch
from keras_mixprec.loss_scaling.presets import PRESETS
from keras_mixprec.monitoring.failures import failure_event, warn_disabled

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


# Nothing is diagnosed: the counters are read at the end only. At 2**-1 the
# gradient of 2e4 * 4 would fit float16, so that 18 steps are a search.
@pytest.mark.parametrize(
    ("name", "steps"),
    [("own", 100), ("torch", 100), ("torch", 18), ("deepspeed", 100)]
    + [
        pytest.param(name, 100, marks=pytest.mark.slow)
        for name in PRESETS
        if name not in ("torch", "deepspeed")
    ],
)
def test_a_collapse_is_told_from_a_search_under_every_rule(
    name, steps, tmp_path
):
    model, values = chain(wrap=following(name)), [1000.0] * steps
    run = watched(tmp_path, values, model, update_freq=1000)
    assert run.summary.optimizers[""].skipped == steps
    collapses = [v for v in run.verdicts if v.kind == "scale_collapsed"]
    assert len(collapses) == (steps == 100)


# Keras' own, and two of the five presets that have no floor.
@pytest.mark.parametrize("name", ["own", "torch", "mxnet"])
def test_a_tuner_gives_up_without_a_floor(name, monkeypatch):
    monkeypatch.setattr(
        "keras_mixprec.diagnosis.in_training.examine",
        lambda *args, **options: Examination([]),
    )
    callback = tuner(on_limit="raise")
    with pytest.raises(FloatingPointError, match="no layer is"):
        fit(chain(wrap=following(name)), [1000.0] * 400, [callback])
    assert callback.history[-1]["kind"] == "give_up"


def at_the_floor(inner):
    rule = kmp.DynamicLossScale(2.0, min_scale=1.0)
    return kmp.LossScaleOptimizer(inner, rule)


@pytest.mark.parametrize(
    ("wrap", "stop_after", "reason"),
    [
        (following("ours"), 3, "3 steps"),
        (lambda inner: following("ours")(inner, 1.0), 3, "3 steps"),
        (following("own"), 3, "3 steps"),
        (lambda inner: following("own")(inner, 1.0), 3, "3 steps"),
        # Rules without a floor, and one with.
        (following("torch"), 3, "3 steps"),
        (following("mxnet"), 3, "3 steps"),
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


@each_jit
def test_other_runs_go_on(jit, tmp_path):
    values, model = with_bad(good(12), 2, 5), one_weight(at_the_floor, jit)
    run = watched(tmp_path, values, model, update_freq=1, stop_after=3)
    assert model.optimizer.attempted_steps == 12
    assert run.told("stopped") == []
    assert "scale_collapsed" not in [v.kind for v in run.verdicts]


class Ended(keras.callbacks.Callback):
    ended = False

    def on_train_end(self, logs=None):
        self.ended = True


@pytest.mark.parametrize("with_tuner", [False, True])
def test_a_backup_outlives_a_run_that_raises(with_tuner, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    watcher = monitor(tmp_path, stop_after=5, on_stop="raise", update_freq=2)
    ours = [tuner(dry_run=True), watcher] if with_tuner else [watcher]
    model, other = one_weight(), Ended()
    values = [*good(8), *[BAD] * 24]
    with pytest.raises(FloatingPointError, match="in a row"):
        fit(model, values, [backup, *ours, other], epochs=4)
    assert not other.ended
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


class InCall(layers.Layer):
    """Raises when it is called on numbers, in `fit` for the first time."""

    def call(self, x):
        if getattr(getattr(x, "device", None), "type", "") == "meta":
            return x  # Where torch works shapes out.
        raise OSError("lookup table")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


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
    raises = Raises(OSError("disk is full"), batch)
    watcher, run = ended(tmp_path, model, OSError, raises)
    assert run["headline"]["state"] == "failing"
    finding = run["events"][run["finding"]["event"]]
    assert (finding["kind"], finding["level"]) == ("fit_raised", "bad")
    assert finding["step"] == batch
    assert f"step {batch + 1}:" in run["headline"]["text"]
    printed = capsys.readouterr().out
    for place in watcher.report, printed, watcher.summary:
        assert "OSError: disk is full" in prose(place)
        assert "no findings" not in prose(place)
    # A fit after it is judged by itself.
    later = watched(tmp_path, good(2), model).overview()
    assert later["headline"]["state"] != "failing"


# JAX calls it before `fit` has begun.
@every_backend
@not_jax
def test_a_step_in_float32_that_raises(tmp_path):
    model = dense(InCall(), inputs=1, policy="float32", jit=False)
    _, run = ended(tmp_path, model, (OSError, RuntimeError))
    assert run["headline"]["state"] == "failing"
    assert "lookup table" in prose(kmp.load_report(tmp_path))
    finding = run["events"][run["finding"]["event"]]
    assert finding["step"] in (0, 1)


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


def test_dicts_and_weights_of_samples_are_kept(tmp_path):
    batch = ({"a": np.ones(2), "b": [np.zeros(3), None]}, np.ones(1), None)
    kept = FailingBatch(4, batch, [np.ones((2, 2))], [], {"optimizer": 2.0}, {})
    kept.save(tmp_path / "b.npz")
    found = FailingBatch.load(tmp_path / "b.npz")
    keras.tree.map_structure(np.testing.assert_array_equal, found.batch, batch)
    np.testing.assert_array_equal(found.weights[0], np.ones((2, 2)))
    assert (found.step, found.scales) == (4, {"optimizer": 2.0})


def test_other_files_and_other_models_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    with pytest.raises(ValueError, match="Received: path"):
        FailingBatch.load(tmp_path / "other.npz")
    batch = FailingBatch(0, (np.ones((2, 4)),), [np.ones((9, 9))], [], {}, {})
    with pytest.raises(ValueError, match="Received: model"):
        batch.replay(model_with_squares())


@every_backend
@not_torch
def test_of_several_steps_in_one_call_none_is_kept(tmp_path):
    model = one_weight(jit=BACKEND == "jax", steps_per_execution=2)
    with pytest.warns(UserWarning, match="cannot keep"):
        run = watched(
            tmp_path, with_bad(good(4), 2), model, keep_failing_batches=2
        )
    assert run.watcher.failing_batches == []
    assert model.optimizer.attempted_steps == 4


# A disk that fails in between.

STEPS = 10


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as folder:
        yield folder


class Fails(keras.callbacks.Callback):
    """The folder of the log is full, removed or replaced in an epoch of 3."""

    def __init__(self, folder, how):
        super().__init__()
        self.folder, self.how, self.full = folder, how, full(folder)

    def on_epoch_begin(self, epoch, logs=None):
        if self.how == "full" and epoch:
            ends = self.full.__enter__, lambda: self.full.__exit__(*[None] * 3)
            ends[epoch - 1]()
        elif epoch == 1:
            shutil.rmtree(self.folder)
            if self.how == "replaced":
                self.folder.write_text("in its place")


@pytest.mark.parametrize(
    "how",
    [pytest.param("full", marks=every_backend), "removed", "replaced"],
)
def test_a_disk_that_fails_ends_nothing(how, disk, tmp_path):
    folder = disk / "log" if how != "full" else disk
    values, options = with_bad(good(STEPS), 3) * 3, {"update_freq": 1}
    options["epochs"] = 3
    with pytest.warns(UserWarning, match="not be written") as warned:
        run = watched(folder, values, None, Fails(folder, how), **options)
    # Keras and NumPy have others, of their own.
    messages = [str(w.message) for w in warned if w.category is UserWarning]
    [line] = [message for message in messages if "written" in message]
    assert "\n" not in line
    assert run.history == watched(tmp_path / "b", values, epochs=3).history
    if how == "replaced":
        assert folder.read_text() == "in its place"
        return
    first = 0 if how == "full" else STEPS + 1
    assert [*run.scalars("loss_scale")] == [*range(first, 3 * STEPS + 1)]
    [gap] = run.told("log_gap")
    assert run.told("train_end")
    assert run.overview()["layers"]
    if how == "full":
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
    ("blocked", "others", "error", "match"),
    [
        (None, [NotYet()], ValueError, "not yet"),
        (None, [kmp.MixPrecMonitor("b")], ValueError, "one `MixPrecMonitor`"),
        ("log", [], OSError, "Received: .*log"),
        ("log/mixprec", [], OSError, "Received: .*log"),
    ],
)
def test_a_fit_that_does_not_start(blocked, others, error, match, tmp_path):
    model, watcher = one_weight(), monitor(tmp_path / "log")
    if blocked:
        (tmp_path / blocked).parent.mkdir(exist_ok=True)
        (tmp_path / blocked).write_text("in the way")
    with pytest.raises(error, match=match):
        fit(model, good(2), [watcher, *others])
    assert fit(model, [1 / 8], []) == {"loss": [1 / 64]}
    folder = tmp_path / ("other" if blocked else "log")
    run = watched(folder, [BAD, 1 / 8], model)
    assert run.history == {"loss": [1 / 64]}
    assert len(run.told("skipped_step")) == 1
    assert model.evaluate(*arrays([1 / 8]), verbose=0) == 1 / 64
    assert not blocked or (tmp_path / blocked).read_text() == "in the way"


@pytest.mark.parametrize("kind", [kmp.MixPrecMonitor, kmp.PrecisionTuner])
def test_one_callback_is_not_passed_twice(kind, tmp_path):
    callback = kind(tmp_path / "path", verbose=0)
    with pytest.raises(ValueError, match=f"same {kind.__name__} again"):
        fit(one_weight(), good(2), [callback, callback])


# By argument, values of the wrong type and wrong ones.
WRONG = {
    "update_freq": ([1.5, "x", True], [0, -1]),
    "probe_every": ([None], [-1]),
    "on_stop": ([], ["explode"]),
    "stop_after": (["x"], [0]),
    "keep_failing_batches": ([0.5], [-1]),
    "max_overhead": (["x", None], [-1, 2, math.nan]),
    "verbose": (["auto"], [2]),
    "log_dir": ([5, None], ["gs://bucket/x"]),
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


class Refuses(layers.Layer):
    def call(self, x):
        raise TypeError("\x1b[31mnot\x1b[0m " + "like this " * 100)


@pytest.fixture
def error():
    """What Keras makes of it: paragraphs in bold."""
    with pytest.raises(TypeError) as caught:
        Refuses(name="refuses")(keras.ops.ones((2, 2)))
    assert "\n" in str(caught.value)
    assert "\x1b[1m" in str(caught.value)
    return caught.value


@pytest.mark.usefixtures("training_goes_on")
@pytest.mark.parametrize("form", [lambda e: e, str], ids=["error", "text"])
def test_a_warning_is_one_line(error, form):
    with pytest.warns(UserWarning, match="cannot do it") as caught:
        warn_disabled("do it", form(error))
    (line,) = (str(w.message) for w in caught)
    assert "Refuses.call(). not like this" in line
    assert len(line) < 300
    assert not {"\n", "\x1b"} & {*line}


def test_the_log_has_the_details(error):
    event = failure_event("probe_failed", error, layer="refuses")
    assert (event["kind"], event["layer"]) == ("probe_failed", "refuses")
    assert event["reason"].startswith("TypeError: Exception")
    assert len(event["reason"]) <= 200
    assert "in call\n" in event["details"]
    assert "\x1b" not in event["details"]
    assert len(event["details"]) <= 8000
    # An error without words has its name.
    assert failure_event("x", KeyError())["reason"] == "KeyError"
    assert failure_event("x", "why")["details"] == "why"


PARTS = {
    "read the counters": "monitoring.counters.Counters.nonfinite_curves",
    "time steps": "monitoring.step_clock.StepClock.go_on",
    "log layers": "callbacks.fit_state.LayerLog.write",
    "look at metrics": "monitoring.metric_values.MetricValues.read",
    "measure layers": "monitoring.range_schedule.RangeReader.finish",
    "sum up this run": "monitoring.summary.summarize",
    "tune this model": "tuning.controller.NonfiniteStepCount.count",
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


def test_what_ends_a_process_is_let_through(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    part = PARTS["read the counters"]
    monkeypatch.setattr(f"keras_mixprec.{part}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watched(tmp_path, good(4))
