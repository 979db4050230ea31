"""A loss scale that fell far and stays low is a finding; a search is none."""

import numpy as np
import pytest
from monitor_models import (
    JITS,
    each_optimizer,
    fit,
    good,
    monitor,
    one_weight,
    told,
    with_bad,
)

import keras_mixprec as kmp
from keras_mixprec.monitoring.low_scale import LowScales
from keras_mixprec.monitoring.recorded_steps import Reading
from keras_mixprec.monitoring.scale_curve import ScalePoint
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.headline import headline, main_finding

JIT = next(iter(JITS))


class Log:
    """What is logged, in memory."""

    def __init__(self):
        self.events = []

    def event(self, step, event):
        self.events.append(event | {"step": step})


def follow(finite, rule=None, every=1, bad=()):
    """The events of a rule over steps, each finite or not."""
    rule = rule or kmp.DynamicLossScale()
    log, state = Log(), rule.initial_state()
    low = LowScales(log)
    skipped, points, new = 0, [ScalePoint(0, float(state.scale), 0, 0)], []
    for step, is_finite in enumerate(finite, start=1):
        state = rule.next_state(state, is_finite)
        skipped += not is_finite
        if not is_finite:
            new.append(Skipped(step, {"x": 0} if step in bad else {}))
        point = ScalePoint(step, float(state.scale), skipped, step - skipped)
        if point.scale != points[-1].scale or step % every == 0:
            points.append(point)
        if step % every == 0:
            low.read("", reading(points, new), rule)
            points, new = [point], []
    return log.events


class Skipped:
    def __init__(self, step, inputs):
        self.step, self.inputs = step, inputs


def reading(points, new):
    return Reading(points, [], 0, 0, False, new, [], {}, {}, 0)


def steps(*runs):
    """`(count, finite)` one after the other."""
    return [finite for count, finite in runs for _ in range(count)]


BURST = steps((50, True), (12, False))


@pytest.mark.parametrize("every", [1, 7, 50, 1000])
def test_a_burst_is_reported_with_the_way_back(every):
    events = follow([*BURST, *[True] * 938], every=every)
    (event,) = events
    assert event["kind"] == "loss_scale_low"
    assert (event["held"], event["scale"]) == (2.0**15, 2.0**3)
    assert event["at_step"] == 51
    assert event["good_steps"] == 12 * 2000
    # What the rule itself needs.
    rule = kmp.DynamicLossScale(initial_scale=8.0)
    state, needed = rule.initial_state(), 0
    while state.scale < event["held"]:
        state, needed = rule.next_state(state, True), needed + 1
    assert event["good_steps"] == needed


@pytest.mark.parametrize(
    "finite",
    [
        # Down to where gradients fit, from the first step on.
        steps((12, False), (2000, True), (1, False), (2000, True)),
        # The ceiling is felt for again and again, and sinks.
        steps(*[(2000, True), (2, False)] * 12),
        # A few steps that overflow.
        steps((50, True), (7, False), (500, True)),
    ],
    ids=["search", "ceiling", "few"],
)
def test_a_search_for_the_scale_is_no_alarm(finite):
    assert follow(finite, every=10) == []


def test_a_short_way_back_is_no_alarm():
    rule = kmp.DynamicLossScale(growth_interval=50)
    assert follow([*BURST, *[True] * 100], rule) == []


def test_a_scale_that_is_set_by_hand_is_no_alarm():
    low = LowScales(log := Log())
    points = [ScalePoint(0, 2.0**15, 0, 0), ScalePoint(50, 8.0, 0, 50)]
    found = reading([*points, ScalePoint(90, 8.0, 0, 90)], [])
    low.read("", found, kmp.FixedLossScale(8.0))
    assert log.events == []


def test_it_is_over_when_the_scale_has_grown_back():
    rule = kmp.DynamicLossScale(growth_interval=100)
    kinds = [e["kind"] for e in follow([*BURST, *[True] * 1000], rule)]
    assert kinds == ["loss_scale_low", "loss_scale_recovered"]


def test_it_is_over_when_the_scale_proves_to_fit():
    finite = [*BURST, *[True] * 2000, False, *[True] * 50]
    kinds = [event["kind"] for event in follow(finite)]
    assert kinds == ["loss_scale_low", "loss_scale_recovered"]


def test_bad_data_from_the_first_step_are_no_search():
    finite = steps((12, False), (50, True))
    assert follow(finite) == []
    (event,) = follow(finite, bad=range(1, 13))
    assert (event["held"], event["at_step"]) == (2.0**15, 1)


@pytest.mark.parametrize("overflows", [False, True])
def test_what_bad_data_alone_have_lowered_is_told_apart(overflows):
    finite = steps((50, True), (12, False), (50, True))
    bad = range(51, 62 if overflows else 63)
    (event,) = follow(finite, every=20, bad=bad)
    assert event["cause"] == ("overflow" if overflows else "bad_data")
    said = event["message"] + event["advice"]
    by_data = "bad data lowered the loss scale from 2**15"
    assert (by_data in said) != overflows
    assert ("overflow" in said) == overflows


def test_a_scale_that_falls_on_is_reported_on():
    # One step of twenty overflows.
    finite = steps((50, True), *[(1, False), (19, True)] * 12)
    events = follow(finite)
    assert [event["scale"] for event in events] == [
        2.0**bits for bits in range(7, 2, -1)
    ]
    assert {event["at_step"] for event in events} == {51}


# In a run.


def trained(tmp_path, wrap=kmp.LossScaleOptimizer):
    """A run in which a burst of overflow takes the scale to 2**3."""
    watcher = monitor(tmp_path, update_freq=5)
    model = one_weight(wrap, jit=JIT)
    fit(model, with_bad(good(30), *range(10, 22)), [watcher])
    return model, watcher


def test_the_sentence_the_report_and_the_console_say_it(tmp_path):
    _, watcher = trained(tmp_path)
    clause = (
        "the loss scale fell from 2**15 to 2**3 at step 11; growing back "
        "takes 24,000 good steps"
    )
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    for found in watcher.summary.headline, run["headline"]:
        assert clause in found["text"]
        assert found["state"] == "severe"
    said = " ".join(str(report).split())
    assert f"{clause[:1].upper()}{clause[1:]}. " in said
    assert "gradients below 2**-28 become 0" in said
    assert clause in " ".join(str(watcher.summary).split())


@each_optimizer
def test_its_fix_restores_the_scale(wrap, tmp_path):
    model, _ = trained(tmp_path, wrap)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    (event,) = (e for e in run["events"] if e["kind"] == "loss_scale_low")
    assert event["growth_interval"] == 2000
    exec(event["fix"]["training"], {"model": model})
    assert float(model.optimizer.loss_scale) == 2.0**15


def test_the_tuner_that_puts_the_scale_back_leaves_no_finding(tmp_path):
    watcher = monitor(tmp_path, update_freq=5)
    model = one_weight(jit=JIT)
    x = np.full((120, 1), 0.5, "float32")
    x[40:88] = np.nan
    model.fit(
        x,
        np.zeros((120, 1)),
        4,
        shuffle=False,
        verbose=0,
        callbacks=[watcher, kmp.PrecisionTuner(verbose=0)],
    )
    assert told(tmp_path, "bad_batches")
    assert "fell" not in watcher.summary.headline["text"]


LOW = {
    "kind": "loss_scale_low",
    "optimizer": "",
    "step": 70,
    "message": "the loss scale fell",
}
AGAIN = {"kind": "loss_scale_recovered", "optimizer": "", "step": 900}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([LOW], "warning"),
        ([LOW, AGAIN], "not_compared"),
        ([AGAIN, LOW], "warning"),
    ],
)
def test_what_is_over_is_not_said(events, state):
    layers = [{"path": "a", "compute_dtype": "float16"}]
    facts = Facts(events, layers, 999, {"": 12}, 0, measured=True)
    found = headline(facts)
    assert found["state"] == state
    assert ("fell" in found["text"]) == (state == "warning")
    main = main_finding(facts)
    assert (main and main["event"]) == (LOW if state == "warning" else None)
