"""What the tuner's diagnoses cost, and when they are made."""

import keras
import numpy as np
import pytest
from monitor_models import each_jit, monitor
from tuner_models import chain, done, fit, tuner
from zoo import cases

from keras_mixprec.diagnosis import in_training


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
def seconds(monkeypatch, diagnosed, clock):
    """A clock that steps move by 2 ms, and each diagnosis by one second."""
    noted = in_training.examine

    def examine(*args, **kwargs):
        clock.wait(1.0)
        return noted(*args, **kwargs)

    monkeypatch.setattr(in_training, "examine", examine)
    return clock


def ticking(clock):
    def tick(batch, logs=None):
        clock.wait(0.002)

    return keras.callbacks.LambdaCallback(on_train_batch_end=tick)


def test_diagnoses_of_a_run_that_diverges_wait_for_each_other(diagnosed):
    (case,) = cases(["learning_rate_too_high"])
    model = case.model("mixed_float16", False)
    case.fit(model, callbacks=[tuner()])
    # There were 208 steps, and 6 diagnoses. The first explains the skips before
    # step 8, since the scale had to fall, and three more.
    assert diagnosed[:2] == [0, 11]
    assert diagnosed[2] > 11 + 100


def test_audits_come_at_the_steps_that_the_documents_name(diagnosed):
    fit(chain(), [1.0] * 200, tuner())
    assert diagnosed == [0, 16, 48, 192]


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
        return watcher.summary.headline["text"]

    assert summary().count("compared with float32") == 1
    assert "keras_mixprec.diagnose(model, x, y)" in summary()
    assert "compared with float32" not in summary(tuner())
