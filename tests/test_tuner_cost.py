"""What the tuner's diagnoses cost, and when they are made."""

import numpy as np
import pytest
from monitor_models import each_jit, monitor
from tuner_models import chain, done, fit, tuner
from zoo import cases

from keras_mixprec.diagnosis import in_training as examiner


@pytest.fixture
def diagnosed(monkeypatch):
    """The steps at which a batch is diagnosed."""
    steps, examine = [], examiner.examine

    def noted(*args, step=None):
        steps.append(step)
        return examine(*args, step=step)

    monkeypatch.setattr(examiner, "examine", noted)
    return steps


def test_a_run_that_diverges_is_not_diagnosed_again_and_again(diagnosed):
    (case,) = cases(["learning_rate_too_high"])
    case.fit(case.model("mixed_float16", False), callbacks=[tuner()])
    # Three audits and four false alarms at any cost; it was 12 times.
    assert len(diagnosed) <= 8


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
