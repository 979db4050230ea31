"""What the tuner's diagnoses cost, and when they are made."""

import time

import keras
import numpy as np
import pytest
from monitor_models import each_jit, monitor
from tuner_models import chain, done, fit, tuner
from zoo import cases

from keras_mixprec.diagnosis import in_training
from keras_mixprec.tuning.trigger import Trigger


@pytest.fixture
def diagnosed(monkeypatch):
    """The steps at which a batch is diagnosed."""
    steps, examine = [], in_training.examine

    def noted(*args, **kwargs):
        steps.append(kwargs["step"])
        return examine(*args, **kwargs)

    monkeypatch.setattr(in_training, "examine", noted)
    return steps


def test_a_run_that_diverges_is_not_diagnosed_again_and_again(diagnosed):
    (case,) = cases(["learning_rate_too_high"])
    case.fit(case.model("mixed_float16", False), callbacks=[tuner()])
    # Three audits and four false alarms at any cost; it was 12 times.
    assert len(diagnosed) <= 8


@pytest.fixture
def seconds(monkeypatch, diagnosed):
    """A clock that steps move by 2 ms, and each diagnosis by one second."""
    now, noted = [100.0], in_training.examine

    def examine(*args, **kwargs):
        now[0] += 1.0
        return noted(*args, **kwargs)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(in_training, "examine", examine)
    return now


def ticking(now):
    def tick(batch, logs=None):
        now[0] += 0.002

    return keras.callbacks.LambdaCallback(on_train_batch_end=tick)


def test_diagnoses_of_a_run_that_diverges_wait_for_each_other(
    diagnosed, seconds
):
    (case,) = cases(["learning_rate_too_high"])
    model = case.model("mixed_float16", False)
    case.fit(model, callbacks=[tuner(), ticking(seconds)])
    # 500 steps take as long as a diagnosis; there were 208, and 6 diagnoses.
    # The first explains the skips before step 8, since the scale had to fall,
    # and three more.
    assert diagnosed == [0, 11]


def test_a_scale_search_that_is_explained_is_not_diagnosed_again(diagnosed):
    (case,) = cases(["initial_scale_too_high"])
    callback = tuner()
    case.fit(case.model("mixed_float16", False), callbacks=[callback])
    # 8 skips and more; the audits after 16 steps and 48 come all the same.
    assert diagnosed[:2] == [0, 16]
    assert not callback.history


def test_a_scale_that_falls_further_than_explained_is_diagnosed(seconds):
    """A fault of one batch in eight, behind a search for the loss scale."""
    (case,) = cases(["calibrated_experts"])
    model = case.model("mixed_float16", False)
    case.fit(model, callbacks=[tuner(), ticking(seconds)])
    # 184 on torch while only the time spent decided: until step 561 of 640.
    assert model.optimizer.skipped_steps < 40


def test_what_lets_a_diagnosis_cost_what_it_costs():
    trigger = Trigger()
    bits = [15.0]

    def is_overhead():
        return trigger.is_overhead(False, lambda: bits[0])

    trigger.add(1, 1)
    assert not is_overhead()
    for _ in range(2):
        trigger.false_alarm()
    assert is_overhead()
    trigger.explain(5, bits[0], triggered=True)
    for now, beyond in ((10.0, True), (7.0, True), (6.0, False)):
        bits[0] = now
        assert is_overhead() == beyond
    # An audit of a batch that did not fail says nothing of why it fell.
    trigger.explain(0, bits[0], triggered=False)
    assert not is_overhead()
    trigger.explain(0, bits[0], triggered=True)
    assert is_overhead()


def test_a_fault_behind_a_divergence_is_repaired(diagnosed, seconds):
    model, callback = chain(), tuner()
    values = [1.0] + [1e38] * 30 + [1.0] * 300 + [1000.0] * 30
    fit(model, values, callback, ticking(seconds))
    (step,) = done(callback)
    assert 331 < step <= 331 + 8


def test_a_dry_run_does_not_diagnose_every_step_that_fails(diagnosed):
    callback = tuner(dry_run=True)
    fit(chain(), [1000.0] * 60, callback)
    assert [change["kind"] for change in callback.history] == ["demote"]
    # Twice as many steps are waited for each time; it was 29 times.
    assert len(diagnosed) <= 8


@each_jit
def test_skips_in_a_row_are_diagnosed_at_once(jit, diagnosed):
    model, callback = chain(jit), tuner()
    fit(model, [1.0] * 3 + [1000.0] * 10, callback)
    (step,) = done(callback)
    assert step <= 6
    assert model.optimizer.skipped_steps <= 3


@each_jit
def test_five_skips_in_a_row_are_no_false_alarm(jit, diagnosed):
    model, callback = chain(jit), tuner()
    # Bad data come to nothing twice: four bad steps are waited for from here.
    values = [1.0, np.nan, np.nan, 1.0, np.nan, np.nan, 1.0] + [1.0] * 3
    fit(model, values + [1000.0] * 8, callback)
    assert done(callback)
    assert done(callback)[0] <= 10 + 7


def test_the_monitor_says_what_it_does_not_see(tmp_path):
    def summary(*callbacks):
        watcher = monitor(tmp_path)
        fit(chain(), [1.0] * 4, watcher, *callbacks)
        return " ".join(str(watcher.summary).split())

    assert "Not compared with float32" in summary()
    assert "keras_mixprec.diagnose(model, x, y)" in summary()
    assert "Not compared" not in summary(tuner())
