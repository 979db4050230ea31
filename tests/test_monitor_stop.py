"""Runs that end early because nothing helps."""

import keras
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    each_jit,
    each_optimizer,
    fit,
    good,
    monitor,
    one_weight,
    scalars,
    told,
)
from tuner_models import chain, tuner

import keras_mixprec as kmp
from keras_mixprec import _clock
from keras_mixprec.diagnosis.examination import Examination
from keras_mixprec.loss_scaling.presets import PRESETS

JIT = BACKEND == "jax"


def following(name):
    """Wraps an optimizer in Keras' own or one that follows a preset."""

    def wrap(inner, initial_scale=2.0**15):
        if name is None:
            return keras.optimizers.LossScaleOptimizer(inner, initial_scale)
        return kmp.LossScaleOptimizer(inner, kmp.DynamicLossScale.preset(name))

    return wrap


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_a_collapse_is_reported_under_every_rule(name, tmp_path):
    # Nothing is diagnosed: the counters are read at the end only.
    watcher = monitor(tmp_path, update_freq=1000)
    model = chain(wrap=following(name))
    fit(model, [1000.0] * 100, [watcher])
    assert watcher.summary.optimizers[""].skipped == 100
    assert [v.kind for v in watcher.verdicts] == ["scale_collapsed"]


def test_a_search_for_a_small_scale_is_no_collapse(tmp_path):
    # At 2**-1 the gradient of 2e4 * 4 would fit float16.
    watcher = monitor(tmp_path, update_freq=18)
    fit(chain(wrap=following("torch")), [1000.0] * 18, [watcher])
    assert "scale_collapsed" not in [v.kind for v in watcher.verdicts]


# Keras' own, and two of the five presets that have no floor.
@pytest.mark.parametrize("name", [None, "torch", "mxnet"])
def test_a_tuner_gives_up_without_a_floor(name, monkeypatch):
    monkeypatch.setattr(
        "keras_mixprec.diagnosis.in_training.examine",
        lambda *args, **options: Examination([]),
    )
    callback = tuner(on_limit="raise")
    with pytest.raises(FloatingPointError, match="no layer is to blame"):
        fit(chain(wrap=following(name)), [1000.0] * 400, [callback])
    assert callback.history[-1]["kind"] == "give_up"


@each_jit
@each_optimizer
@pytest.mark.parametrize("start", [2.0**15, 1.0])
def test_it_stops_whatever_the_scale(wrap, jit, start, tmp_path):
    model = one_weight(lambda inner: wrap(inner, initial_scale=start), jit)
    watcher = monitor(tmp_path, update_freq=1, stop_after=3)
    fit(model, [*good(2), *[BAD] * 30], [watcher])
    assert watcher.summary.optimizers[""].steps < 10
    (event,) = told(tmp_path, "stopped")
    assert event["reason"] == "3 steps in a row were skipped"


@pytest.mark.parametrize("name", ["torch", "keras", "apex", "paddle", "mxnet"])
def test_it_stops_under_a_rule_without_a_floor(name, tmp_path):
    assert kmp.DynamicLossScale.preset(name).min_scale is None
    model = one_weight(following(name), JIT)
    watcher = monitor(tmp_path, update_freq=1, stop_after=3)
    fit(model, [*good(2), *[BAD] * 30], [watcher])
    assert watcher.summary.optimizers[""].steps < 10
    (event,) = told(tmp_path, "stopped")
    assert event["reason"] == "3 steps in a row were skipped"


class Ended(keras.callbacks.Callback):
    ended = False

    def on_train_end(self, logs=None):
        self.ended = True


@each_jit
@pytest.mark.parametrize("with_tuner", [False, True])
def test_a_backup_outlives_a_run_that_raises(jit, with_tuner, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    watcher = monitor(tmp_path, stop_after=5, on_stop="raise", update_freq=2)
    ours = [tuner(dry_run=True), watcher] if with_tuner else [watcher]
    model, other = one_weight(jit=jit), Ended()
    values = [*good(8), *[BAD] * 24]
    with pytest.raises(FloatingPointError, match="steps in a row were skip"):
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
    with pytest.raises(FloatingPointError, match="5 steps in a row"):
        fit(one_weight(jit=JIT), [BAD] * 5, [watcher])
    assert watcher.summary.optimizers[""].skipped == 5


@each_jit
@pytest.mark.parametrize("epochs", [1, 8])
@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_it_stops_at_the_very_step_on_any_machine(
    seconds, epochs, jit, tmp_path, clock
):
    def read():
        clock.wait(seconds)
        return clock.now

    # Its only epoch, or epochs of eight steps.
    values = [*good(6), *[BAD] * 58]
    model = one_weight(jit=jit)
    watcher = kmp.MixPrecMonitor(tmp_path, stop_after=20, verbose=0)
    with _clock.set_to(read):
        fit(model, values, [watcher], epochs=epochs)
    # Keras ends an epoch after the step that has begun.
    assert watcher.summary.optimizers[""].skipped in (20, 21)
