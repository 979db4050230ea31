"""Step times and the budget of the monitor, with a simulated clock."""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    ROWS,
    dense,
    every_backend,
    not_torch,
    one_backend,
    watched,
)

from keras_mixprec.monitoring.speed import OverheadBudget, StepClock
from keras_mixprec.reporting.performance import is_of_training, speed_values
from keras_mixprec.reporting.schema import Row

pytestmark = [
    one_backend,
    # The number of batches of a generator is not known before its end.
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

PAUSE = 0.01


class Pace(keras.callbacks.Callback):
    """Makes steps of known length, with a clock that only steps move."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_train_batch_begin(self, batch, logs=None):
        self.clock.wait(PAUSE)

    def on_epoch_end(self, epoch, logs=None):
        self.clock.wait(20 * PAUSE)


def batches(count, last=ROWS):
    for number in range(count):
        rows = last if number == count - 1 else ROWS
        yield np.ones((rows, 4), "float32"), np.ones((rows, 1))


def figures(run):
    (card,) = (card for card in run["cards"] if card["name"] == "speed")
    return {figure["name"]: figure["value"] for figure in card["figures"]}


def near(expected, rel=1e-6):
    return pytest.approx(expected, rel=rel)


def of_epochs():
    x = np.ones((ROWS * 12, 4), "float32")
    data = x, x[:, :1]
    options = {"validation_data": data, "epochs": 3, "batch_size": ROWS}
    return {"data": data} | options


def of_several_steps_at_once():
    model = dense(jit=BACKEND == "jax", steps_per_execution=4)
    return {"model": model, "data": batches(80), "steps_per_epoch": 80}


@pytest.mark.parametrize(
    ("make", "at_once", "off"),
    [
        (lambda: {"data": batches(60)}, 1, 1e-6),
        pytest.param(of_epochs, 1, 1e-6, marks=every_backend),
        (lambda: {"data": batches(25, last=1)}, 1, 0.1),
        pytest.param(
            *(of_several_steps_at_once, 4, 1e-6),
            marks=[not_torch, every_backend],
        ),
    ],
)
def test_a_step_takes_what_the_clock_says(make, at_once, off, tmp_path, clock):
    """The pause between epochs and a small last batch are no part of it."""
    made = {"model": dense(), "update_freq": 10} | make()
    data, model = made.pop("data"), made.pop("model")
    run = watched(tmp_path, data, model, Pace(clock), **made)
    found = figures(run.overview())
    for name in "step_time", "step_time_median", "step_time_p95":
        assert found[name] == near(PAUSE / at_once)
    rate = found["samples_per_second"] * found["step_time"]
    assert rate == near(ROWS, rel=off)


@pytest.mark.long
@every_backend
def test_readings_of_ranges_are_no_steps(tmp_path, clock):
    x = np.ones((ROWS * 60, 4), "float32")
    often = {"update_freq": 10, "probe_every": 7, "epochs": 2}
    model = dense(rules=[])
    run = watched(tmp_path, (x, x[:, :1]), model, Pace(clock), **often)
    assert len(run.told("ranges_measured")[0]["steps"]) > 10
    found = figures(run.overview())
    assert found["step_time"] == near(PAUSE)
    assert found["output_bytes_saved"] == 0.5
    curve = run.scalars("mixprec_performance/step_time")
    assert min(curve.values()) == near(PAUSE)
    assert {*curve} >= {20, 30, 40, 50}


# On a device that runs behind the host, by a clock that the test moves.


@pytest.fixture
def steps_clock(clock):
    budget = SimpleNamespace(special=0)
    model = SimpleNamespace(train_function="f")
    return StepClock(model, budget, lambda: None)


def stretch_of(steps_clock, clock, behind, steps=21):
    """Enqueues a step in 1 ms, which takes the device 10 ms if it is behind."""
    for step in range(steps):
        steps_clock.stamp(step)
        clock.wait(0.001)
    steps_clock.stamp(steps)
    waited = 0.009 * (steps - 1) if behind else 0.0
    clock.wait(waited)
    steps_clock.waited(steps, waited)
    return steps_clock.take()


def test_what_the_host_enqueues_is_not_taken_for_a_step(steps_clock, clock):
    steps, seconds, durations = stretch_of(steps_clock, clock, behind=True)
    assert seconds / steps == near(0.01)
    assert steps == 20  # The first compiles.
    assert durations == []
    assert steps_clock.behind
    *_, durations = stretch_of(steps_clock, clock, behind=False)
    assert durations == near([0.001] * 21)  # Now they are seen.


# Figures from the rows of a log.


def row(step, steps, median, p95):
    return Row(step, steps, steps * median, steps, median, p95, 1, 0, 0.1, 1)


def found_in(rows):
    return speed_values(rows)


def test_percentiles_are_of_all_rows():
    times = np.random.default_rng(0).exponential(size=200) + 1
    found = found_in(
        [row(n, 1, *[t] * 2) for n, t in enumerate(times.tolist())]
    )
    assert found["measured_steps"] == 200
    expected = np.percentile(times, [50, 95], method="inverted_cdf")
    assert [found["step_time_median"], found["step_time_p95"]] == [*expected]
    # Rows of many steps have the value of most steps.
    rows = [row(n, 50, 1.0, p) for n, p in enumerate((2.0, 3.0, 9.0))]
    found = found_in(rows)
    assert (found["step_time_median"], found["step_time_p95"]) == (1.0, 3.0)


@pytest.mark.parametrize("times", [(1.0, 2.0), (1.0, 2.0, 4.0), (2.0, 1.0)])
def test_samples_a_second_and_the_time_of_a_step_are_of_the_same_steps(times):
    rows = [row(9 * n, 9, t, t) for n, t in enumerate(times, 1)]
    rows = [r._replace(samples=8 * r.steps) for r in rows]
    # TensorFlow's first batch is looked at after 16 steps.
    for first in rows[0], rows[0]._replace(samples=math.nan):
        value = found_in([first, *rows[1:]])
        assert value["samples_per_second"] * value["step_time"] == 8


@pytest.mark.parametrize(
    ("steps", "skipped", "known"),
    [(20, 0.5, True), (19, 0.0, False), (20, 0.84, False)],
)
def test_a_speed_is_one_of_training(steps, skipped, known):
    rows = [row(n, 1, 1.0, 1.0) for n in range(1, steps + 1)]
    assert is_of_training(found_in(rows), skipped) == known


# The budget is a share of the training's own time.


def test_what_is_no_training_leaves_the_budget_alone(clock):
    # 0.0125 of the 0.0525 are for what is not timed; readings and probes have
    # a half each of the rest.
    budget = OverheadBudget(0.0525)
    clock.wait(60.0)  # Compiling.
    budget.add("diagnoses", 30.0)
    assert budget.trained == 0.0
    assert budget.left("probes") == budget.left("readings") == 0.0
    budget.begin()
    clock.wait(40.0)
    budget.pause()
    clock.wait(1000.0)
    budget.go_on()
    clock.wait(90.0)
    budget.add("probes", 30.0, is_overhead=False)  # Which happens once.
    budget.begin()
    assert budget.trained == near(100.0)
    assert budget.left("probes") == near(2.0)
    assert budget.before == 30.0  # Which the summary tells all the same.
