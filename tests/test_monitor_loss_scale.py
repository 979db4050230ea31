"""The logged loss scale equals the optimizer's after each step."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    EveryStep,
    assert_logged,
    each_jit,
    each_optimizer,
    every_backend,
    fit,
    good,
    monitor,
    not_jax,
    not_torch,
    one_backend,
    one_weight,
    prose,
    told,
    watched,
    with_bad,
)
from zoo.gan import Gan

import keras_mixprec as kmp
from keras_mixprec.loss_scaling.rules import PRESETS
from keras_mixprec.monitoring.recorded_steps import ScalePoint
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.headline import headline, main_finding
from keras_mixprec.reporting.low_scale import LowScales

pytestmark = one_backend

STEPS = 120
# One by one, in a burst, and more between two readings than are kept in full.
OVERFLOWS = [10, 11, 12, *range(52, 93), 100, 111, 113, 115]
VALUES = [BAD if i in OVERFLOWS else 1 / 64 for i in range(STEPS)]
# So that it grows as well.
QUICK = {"growth_interval": 7}
RULES = {
    **{n: kmp.DynamicLossScale.preset(n, **QUICK) for n in PRESETS},
    "keras' own": None,
    "hysteresis": kmp.DynamicLossScale(hysteresis=3, **QUICK),
    "fractions": kmp.DynamicLossScale(2.0**10, 1.7, 0.3, **QUICK),
    "table": {0: 1024.0, 49: 512.0, 50: 256.0, 75: 2048.0},
    "schedule": keras.optimizers.schedules.ExponentialDecay(2.0**15, 100, 0.5),
}
SOME = "keras' own", "hysteresis", "schedule", "fractions", "table"


def wrapped(rule):
    def wrap(inner):
        if rule is None:
            return keras.optimizers.LossScaleOptimizer(
                inner, dynamic_growth_steps=7
            )
        return kmp.LossScaleOptimizer(inner, loss_scale=rule)

    return wrap


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME))
        for name in RULES
    ],
)
def test_the_scale_of_every_step_is_logged(name, tmp_path):
    model, seen = one_weight(wrapped(RULES[name])), EveryStep()
    fit(model, VALUES, [monitor(tmp_path), seen], epochs=2)
    assert len(seen.scales) == STEPS + 1
    assert_logged(tmp_path, seen.scales)
    assert told(tmp_path, "loss_scale_not_known") == []


@not_torch
@each_jit
def test_steps_that_are_taken_by_eights(jit, tmp_path):
    rule, seen = kmp.DynamicLossScale.preset("keras", **QUICK), EveryStep()
    fit(one_weight(wrapped(rule), jit), VALUES, [seen])
    model = one_weight(wrapped(rule), jit, steps_per_execution=8)
    fit(model, VALUES, [monitor(tmp_path)])
    assert_logged(tmp_path, seen.scales)


@pytest.mark.long
@every_backend
def test_a_scale_set_by_hand_is_not_guessed(tmp_path):
    class Set(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 70:
                self.model.optimizer.dynamic_scale.assign(2.0**5)
            if batch == 110:
                self.model.optimizer.set_loss_scale(2.0**6)

    run = watched(tmp_path, good(120), one_weight(wrapped(2.0**10)), Set())
    (event,) = run.told("loss_scale_not_known")
    assert (event["first_step"], event["last_step"]) == (51, 100)
    points = run.scalars("loss_scale")
    assert points[50] == 2.0**10
    assert (points[100], points[110], points[120]) == (2**5, 2**6, 2**6)


# A scale that fell far and stays low is a finding, but a search is not.


class Log:
    """A log in memory."""

    def __init__(self):
        self.events = []

    def event(self, step, event):
        self.events.append(event | {"step": step})


def follow(finite, growth_interval=2000, every=1, bad=()):
    """The events of a rule over steps, each finite or not."""
    rule = kmp.DynamicLossScale(growth_interval=growth_interval)
    log, state = Log(), rule.initial_state()
    low = LowScales(log)
    skipped, points = 0, [ScalePoint(0, float(state.scale), 0, 0)]
    for step, is_finite in enumerate(finite, start=1):
        state = rule.next_state(state, is_finite)
        skipped += not is_finite
        point = ScalePoint(step, float(state.scale), skipped, step - skipped)
        if point.scale != points[-1].scale or step % every == 0:
            points.append(point)
        if step % every == 0:
            low.read("", points, {*bad}, rule.growth_factor, growth_interval)
            points = [point]
    return log.events


def steps(*runs):
    """`(count, finite)` one after the other."""
    return [finite for count, finite in runs for _ in range(count)]


BURST = steps((50, True), (12, False))
FIRST = steps((12, False), (50, True))
LOW, RECOVERED = "loss_scale_low", "loss_scale_recovered"


@pytest.mark.parametrize(
    ("finite", "options", "kinds"),
    [
        # Down to where gradients fit, from the first step on.
        (steps((12, False), (2000, True), (1, False), (2000, True)), {}, []),
        # The ceiling is felt for again and again, and sinks.
        (steps(*[(2000, True), (2, False)] * 12), {"every": 10}, []),
        # A short way back.
        ([*BURST, *[True] * 100], {"growth_interval": 50}, []),
        # It has grown back, or proves to fit.
        ([*BURST, *[True] * 1000], {"growth_interval": 100}, [LOW, RECOVERED]),
        ([*BURST, *[True] * 2000, False, *[True] * 50], {}, [LOW, RECOVERED]),
        # Bad data from the first step on are no search.
        (FIRST, {}, []),
        (FIRST, {"bad": range(1, 13)}, [LOW]),
        # One step of twenty overflows.
        (steps((50, True), *[(1, False), (19, True)] * 12), {}, [LOW] * 5),
    ],
)
def test_a_fall_is_told_from_a_search(finite, options, kinds):
    events = follow(finite, **options)
    assert [event["kind"] for event in events] == kinds
    low = [event for event in events if event["kind"] == LOW]
    assert {e["at_step"] for e in low} <= {1 if finite is FIRST else 51}
    if kinds == [LOW] * 5:
        assert [e["scale"] for e in low] == [2.0**n for n in range(7, 2, -1)]


@pytest.mark.parametrize("every", [1, 7, 50, 1000])
def test_a_burst_is_reported_with_the_way_back(every):
    (event,) = follow([*BURST, *[True] * 938], every=every)
    assert event["kind"] == LOW
    assert (event["held"], event["scale"]) == (2.0**15, 2.0**3)
    assert (event["at_step"], event["good_steps"]) == (51, 12 * 2000)
    # Count the steps that the rule itself needs.
    rule = kmp.DynamicLossScale(initial_scale=8.0)
    state, needed = rule.initial_state(), 0
    while state.scale < event["held"]:
        state, needed = rule.next_state(state, True), needed + 1
    assert event["good_steps"] == needed


@pytest.mark.parametrize("overflows", [False, True])
def test_bad_data_alone_are_a_cause_of_their_own(overflows):
    bad = range(51, 62 if overflows else 63)
    (event,) = follow([*BURST, *[True] * 50], every=20, bad=bad)
    assert event["cause"] == ("overflow" if overflows else "bad_data")


@every_backend
@each_optimizer
def test_a_low_scale_is_a_finding_with_a_fix(wrap, tmp_path):
    values = with_bad(good(30), *range(10, 22))
    run = watched(tmp_path, values, one_weight(wrap), update_freq=5)
    found = run.overview()["headline"]
    assert found == run.summary.headline
    assert found["state"] == "severe"
    (event,) = run.told(LOW)
    assert (event["held"], event["scale"]) == (2.0**15, 2.0**3)
    assert (event["at_step"], event["growth_interval"]) == (11, 2000)
    for said in found["text"], run.summary, run.watcher.report:
        assert "24,000 steps" in prose(said)
    (row,) = (x for x in run.overview()["told"] if x["kind"] == LOW)
    exec(row["fixes"]["Fix for training"], {"model": run.model})
    assert float(run.model.optimizer.loss_scale) == 2.0**15


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ([LOW], "warning"),
        ([LOW, RECOVERED], "not_compared"),
        ([RECOVERED, LOW], "warning"),
    ],
)
def test_what_is_over_is_no_finding(kinds, state):
    common = {"optimizer": "", "step": 70, "message": "it fell"}
    events = [common | {"kind": kind} for kind in kinds]
    layers = [{"path": "a", "compute_dtype": "float16"}]
    facts = Facts(events, layers, 999, {"": 12}, 0, measured=True)
    found, main = headline(facts), main_finding(facts)
    assert found["state"] == state
    assert ("fell" in found["text"]) == (state == "warning")
    assert (main and main["event"]["kind"]) == (
        LOW if state == "warning" else None
    )


# JAX hands `fit` the state of one optimizer.
@every_backend
@not_jax
@each_optimizer
def test_each_optimizer_has_counts_and_scales_by_name(wrap, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    names, gan = ("optimizer", "judge"), Gan(keras.layers.Identity())
    for name, player in zip(names, gan.players, strict=True):
        own = {"initial_scale": 1.0, "dynamic_growth_steps": 5}
        optimizer = wrap(keras.optimizers.SGD(0.0), **own)
        optimizer.build(player.trainable_variables)
        setattr(gan, name, optimizer)
    noise, real = np.ones((240, 4), "float32"), np.ones((240, 2), "float32")
    # The generator sees nothing of what is real.
    noise[88:92] = real[160:164] = BAD
    seen = [EveryStep(name) for name in names]
    run = watched(tmp_path, (noise, real), gan, *seen)
    done = run.summary.optimizers
    assert {n: done[n].skipped for n in done} == {"optimizer": 1, "judge": 2}
    # Both skipped one and the same step.
    assert run.overview()["skipped"] == 2
    assert seen[0].scales != seen[1].scales
    for name, each in zip(names, seen, strict=True):
        assert_logged(tmp_path, each.scales, name)
        assert isinstance(getattr(gan, name), kmp.LossScaleOptimizer)
        tag = f"mixprec_gradient_norm_by_variable/{name}/"
        assert any(t.startswith(tag) for t in run.tags())
