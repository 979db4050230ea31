"""What is said where a part of the monitor does not work: one line."""

import warnings

import keras
import pytest
from monitor_models import BACKEND, fit, good, monitor, one_weight, told
from tuner_models import tuner

from keras_mixprec.monitoring.failures import failure_event, warn_disabled

JIT = BACKEND == "jax"


class Refuses(keras.layers.Layer):
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_disabled("do it", form(error))
    (line,) = (str(w.message) for w in caught)
    assert line.startswith(
        "MixPrecMonitor cannot do it; training goes on without"
    )
    assert "calling Refuses.call(). not like this" in line
    assert len(line) < 300
    assert not {"\n", "\x1b"} & {*line}


def test_the_log_has_the_details(error):
    event = failure_event("probe_failed", error, layer="refuses")
    assert (event["kind"], event["layer"]) == ("probe_failed", "refuses")
    assert event["reason"].startswith("TypeError: Exception encountered when")
    assert len(event["reason"]) <= 200
    assert "Traceback (most recent call last)" in event["details"]
    assert "in call\n" in event["details"]
    assert "\x1b" not in event["details"]
    assert len(event["details"]) <= 8000


def test_an_error_without_words_has_its_name():
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

    callbacks = [monitor(tmp_path, update_freq=2), tuner()]
    monkeypatch.setattr(f"keras_mixprec.{PARTS[part]}", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(one_weight(jit=JIT), good(12), callbacks, epochs=2)
    assert len(history["loss"]) == 2
    (said,) = {str(w.message) for w in caught if "broken" in str(w.message)}
    assert f"cannot {part}; training goes on without" in said
    (event,) = told(tmp_path, "task_failed")
    assert event["task"] == part


def test_what_ends_a_process_is_let_through(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    name = "keras_mixprec.monitoring.counters.Counters.nonfinite_curves"
    monkeypatch.setattr(name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(one_weight(jit=JIT), good(4), [monitor(tmp_path)])
