"""Step time, samples a second and time in input, by a second clock."""

import math
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, monitor, not_torch, scalars, tags, told

import keras_mixprec as kmp
from keras_mixprec.monitoring.step_clock import StepClock
from keras_mixprec.reporting.performance import (
    Row,
    performance,
    sentence,
    skipped_of_timed,
)
from keras_mixprec.reporting.run_summary import summary

# Of generators nobody knows beforehand how many batches they have.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

ROWS, STEPS = 8, 60
PAUSE = 0.01


class Pace(keras.callbacks.Callback):
    """Steps of a known length at least, by a clock of its own."""

    def __init__(self, pause=0.0, epoch_pause=0.0):
        super().__init__()
        self.pause, self.epoch_pause, self.begun = pause, epoch_pause, []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(time.monotonic())
        time.sleep(self.pause)

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(self.epoch_pause)

    def per_call(self):
        return np.median(np.diff(self.begun[1:]))


def small(**compiling):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    usual = {"loss": "mse", "jit_compile": BACKEND == "jax"}
    model.compile("sgd", **usual | compiling)
    return model


def batches(count, pause=0.0, last=ROWS, key=None):
    for number in range(count):
        time.sleep(pause)
        rows = last if number == count - 1 else ROWS
        x = np.ones((rows, 4), "float32")
        yield {key: x} if key else x, np.ones((rows, 1))


def figures(tmp_path, data, *callbacks, model=None, **arguments):
    """Trains, and returns the figures of the log by name."""
    watching = monitor(tmp_path, update_freq=10)
    model = model or small()
    usual = {"verbose": 0, "shuffle": False}
    callbacks = [watching, *callbacks]
    model.fit(data, callbacks=callbacks, **usual | arguments)
    return logged(tmp_path)


def logged(tmp_path):
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    return {f["name"]: f["value"] for f in run["performance"]["figures"]}


def is_near(value, expected):
    return 0.5 < value / expected < 2


def test_a_step_takes_what_another_clock_says(tmp_path):
    pace = Pace(PAUSE)
    found = figures(tmp_path, batches(STEPS), pace)
    for name in "step_time", "step_time_median":
        assert is_near(found[name], pace.per_call()), name
    assert found["step_time_p95"] >= found["step_time_median"] >= PAUSE
    assert is_near(found["samples_per_second"], ROWS / pace.per_call())
    assert found["input_share"] is None or found["input_share"] < 0.5
    curve = scalars(tmp_path, "mixprec_performance/step_time")
    assert min(curve.values()) >= PAUSE
    assert set(curve) >= {20, 30, 40, 50}
    names = "step_time", "step_time_median", "step_time_p95", "overhead_share"
    wanted = {*names, "samples_per_second", "input_share", "00000"}
    found = {t.partition("/")[2] for t in tags(tmp_path) if "performance/" in t}
    assert found - {"00001"} == wanted


def test_waiting_for_batches_is_time_in_input(tmp_path):
    pace = Pace()
    found = figures(tmp_path, batches(STEPS, PAUSE), pace)
    # TensorFlow fetches while it trains, and waits for the rest; a busy machine
    # lengthens the rest of some steps, which the share is a mean over.
    least = 0.3 if BACKEND == "tensorflow" else 0.6 * PAUSE / pace.per_call()
    assert least < found["input_share"] <= 1
    assert is_near(found["step_time"], pace.per_call())


def test_a_run_without_a_budget_is_timed_as_well(tmp_path):
    watching = monitor(tmp_path, max_overhead=0.0)
    arguments = {"callbacks": [watching], "verbose": 0, "shuffle": False}
    small().fit(batches(20), **arguments)
    # The first wait ends a stretch of eight, wherever the device is by then.
    assert logged(tmp_path)["step_time"] > 0


def test_what_is_between_epochs_is_no_part_of_a_step(tmp_path):
    x = np.ones((ROWS * 12, 4), "float32")
    validation = {"validation_data": (x, x[:, :1])}
    pace = Pace(PAUSE, epoch_pause=20 * PAUSE)
    arguments = {"y": x[:, :1], "batch_size": ROWS, "epochs": 4} | validation
    found = figures(tmp_path, x, pace, **arguments)
    assert is_near(found["step_time"], pace.per_call())
    assert is_near(found["samples_per_second"], ROWS / pace.per_call())


@pytest.mark.parametrize("known", [True, False])
def test_a_smaller_last_batch_does_not_count_as_a_whole_one(tmp_path, known):
    pace = Pace(PAUSE)
    arguments = {"steps_per_epoch": 25} if known else {}
    found = figures(tmp_path, batches(25, last=1), pace, **arguments)
    rate = found["samples_per_second"] * found["step_time"]
    assert rate == pytest.approx(ROWS, rel=0.1)


@not_torch
def test_steps_of_one_execution_are_counted_each(tmp_path):
    pace = Pace(PAUSE)
    model = small(steps_per_execution=4)
    found = figures(
        tmp_path, batches(80), pace, model=model, steps_per_epoch=80
    )
    assert is_near(found["step_time"], pace.per_call() / 4)
    assert is_near(found["samples_per_second"], 4 * ROWS / pace.per_call())


def test_samples_of_a_dict_are_counted(tmp_path):
    inputs = keras.Input((4,), name="a")
    model = keras.Model({"a": inputs}, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    pace = Pace(PAUSE)
    found = figures(tmp_path, batches(40, key="a"), pace, model=model)
    assert is_near(found["samples_per_second"], ROWS / pace.per_call())
    assert found["flops_in_16_bits"] == 0  # Without a counter to read.


def test_of_a_batch_of_graphs_the_graphs_are_counted(tmp_path):
    nodes, edges = keras.Input((4,)), keras.Input((2,))
    ends = keras.layers.Dense(1)(edges)
    graphs = keras.ops.mean(keras.ops.reshape(nodes, (-1, 3, 4)), axis=1)
    outputs = keras.layers.Dense(1)(graphs) + keras.ops.mean(ends)
    model = keras.Model([nodes, edges], outputs)
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    x = np.ones((3 * ROWS, 4), "float32"), np.ones((7 * ROWS, 2), "float32")
    data = ((x, np.ones((ROWS, 1), "float32")) for _ in range(40))
    pace = Pace(PAUSE)
    found = figures(tmp_path, data, pace, model=model)
    assert is_near(found["samples_per_second"], ROWS / pace.per_call())


def test_a_loop_by_hand_is_timed(tmp_path):
    model, pace = small(), Pace(PAUSE)
    watching = monitor(tmp_path, update_freq=10)
    callbacks = keras.callbacks.CallbackList([watching, pace], model=model)
    callbacks.on_train_begin()
    for number, batch in enumerate(batches(40)):
        callbacks.on_train_batch_begin(number)
        model.train_on_batch(*batch)
    callbacks.on_train_end()
    assert is_near(logged(tmp_path)["step_time"], pace.per_call())


def test_the_last_fit_is_what_counts(tmp_path):
    for pause in 4 * PAUSE, PAUSE:
        pace = Pace(pause)
        found = figures(tmp_path, batches(25), pace)
        assert is_near(found["step_time"], pace.per_call())


def test_probes_and_their_compilation_are_no_steps(tmp_path):
    pace, model = Pace(PAUSE), small()
    watching = monitor(tmp_path, update_freq=10, probe_every=7)
    x = np.ones((ROWS * STEPS, 4), "float32")
    model.fit(
        x, x[:, :1], ROWS, epochs=2, verbose=0, callbacks=[watching, pace]
    )
    assert told(tmp_path, "probe_compiled")
    found = logged(tmp_path)
    assert is_near(found["step_time"], pace.per_call())
    assert found["output_bytes_saved"] == 0.5
    assert found["once_seconds"] > 0


def test_a_step_takes_one_time_stamp(tmp_path, monkeypatch):
    from keras_mixprec.monitoring import step_clock

    asked = []
    clock = SimpleNamespace(
        perf_counter=lambda: asked.append(1) or time.perf_counter()
    )
    monkeypatch.setattr(step_clock, "time", clock)
    figures(tmp_path, batches(STEPS))
    # Of a reading another two: where it ends and where steps go on.
    assert STEPS <= len(asked) <= STEPS + 3 * 8


def test_the_summary_and_the_report_have_it_in_a_line(tmp_path):
    watching = monitor(tmp_path, update_freq=10)
    small().fit(batches(30), shuffle=False, verbose=0, callbacks=[watching])
    line = str(watching.report).partition("\nSpeed: ")[2].partition(".\n")[0]
    assert "a step" in line
    assert f"\nSpeed: {watching.summary.speed}"[:40] in str(watching.summary)


# On a device that runs behind the host, by a clock that the test moves.


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    budget = SimpleNamespace(special=0)
    inputs = SimpleNamespace(seconds=0.0, samples=0)
    model = SimpleNamespace(train_function="f")
    return now, StepClock(model, budget, inputs, lambda: None, 0)


def run(clock, behind, steps=21):
    """Enqueues a step in 1 ms, which takes the device 10 ms if it is behind."""
    now, steps_clock = clock
    for step in range(steps):
        steps_clock.stamp(step)
        now[0] += 0.001
    steps_clock.stamp(steps)
    waited = 0.009 * (steps - 1) if behind else 0.0
    now[0] += waited
    steps_clock.waited(steps, waited)
    return steps_clock.take()


def test_what_the_host_enqueues_is_not_taken_for_a_step(clock):
    stretch, durations = run(clock, behind=True)
    assert stretch.seconds / stretch.steps == pytest.approx(0.01)
    assert stretch.steps == 20  # The first compiles.
    assert durations == []
    assert clock[1].behind
    _, durations = run(clock, behind=False)
    assert durations == pytest.approx([0.001] * 21)  # Now they are seen.


def test_what_the_host_has_seen_end_is_listed(clock):
    stretch, durations = run(clock, behind=False)
    assert durations == pytest.approx([0.001] * 20)
    assert stretch.seconds == pytest.approx(0.02)


def row(step, steps, median, p95):
    return Row(step, steps, steps * median, 0, steps, median, p95, 1, 0, 0.1, 1)


def test_rows_of_one_step_each_have_a_percentile_together():
    times = np.random.default_rng(0).exponential(size=200) + 1
    rows = [row(n, 1, *[t] * 2) for n, t in enumerate(times.tolist())]
    found = {f["name"]: f["value"] for f in performance(rows, [])["figures"]}
    assert found["measured_steps"] == 200
    expected = np.percentile(times, [50, 95], method="inverted_cdf")
    assert [found["step_time_median"], found["step_time_p95"]] == [*expected]


def test_rows_of_many_steps_have_the_percentile_of_most():
    rows = [row(n, 50, 1.0, p) for n, p in enumerate((2.0, 3.0, 9.0))]
    found = {f["name"]: f["value"] for f in performance(rows, [])["figures"]}
    assert (found["step_time_median"], found["step_time_p95"]) == (1.0, 3.0)


def test_of_few_steps_no_percentile_is_said():
    found = performance([row(9, 9, 1.0, 2.0)], [])
    assert sentence(found).startswith("1 s a step, of only 9 steps, 1 samples")


@pytest.mark.parametrize("times", [(1.0, 2.0), (1.0, 2.0, 4.0), (2.0, 1.0)])
def test_samples_a_second_and_the_time_of_a_step_are_of_the_same_steps(times):
    rows = [row(9 * n, 9, t, t) for n, t in enumerate(times, 1)]
    rows = [r._replace(samples=8 * r.steps) for r in rows]
    # TensorFlow's first batch is looked at after 16 steps.
    for first in rows[0], rows[0]._replace(samples=math.nan):
        found = performance([first, *rows[1:]], [])["figures"]
        value = {f["name"]: f["value"] for f in found}
        assert value["samples_per_second"] * value["step_time"] == 8


def speed_of(rows, skipped=0.0):
    return performance(rows, [], skipped=skipped)["speed"]


def test_a_median_may_be_off_by_the_notch_of_its_readings():
    times = [0.9, 0.95, 1.0, 1.05, 1.5, 0.98]
    found = speed_of([row(9 * n, 9, t, t) for n, t in enumerate(times, 1)])
    assert found["lacks"] is None
    first, median, third = np.percentile(times, [25, 50, 75])
    own = found["medians"]["step_time"]
    assert own["median"] == pytest.approx(median)
    assert own["off"] == pytest.approx(1.57 * (third - first) / 6**0.5)


@pytest.mark.parametrize(
    ("steps", "readings", "skipped", "said"),
    [
        (9, 5, 0.5, None),
        (9, 4, 0.0, "4 readings of the time of a step, 5 are needed"),
        (3, 6, 0.0, "18 steps measured, 20 are needed"),
        (9, 5, 1.0, "all of the timed steps skipped: no speed of training"),
        (9, 5, 0.84, "84% of the timed steps skipped: no speed of training"),
    ],
)
def test_a_run_says_why_its_speed_is_not_compared(
    steps, readings, skipped, said
):
    rows = [row(steps * n, steps, 1.0, 1.0) for n in range(1, readings + 1)]
    lacks = speed_of(rows, skipped)["lacks"]
    assert (lacks and lacks["text"]) == said


def test_steps_count_as_skipped_where_they_were_timed():
    # The first ten were skipped, of which two were timed.
    scale = [{"steps": [0, 10], "skipped": [0, 10]}]
    rows = [row(10, 2, 1.0, 1.0), row(30, 6, 1.0, 1.0)]
    assert skipped_of_timed(rows, scale, 0) == 0.25
    assert skipped_of_timed(rows[1:], scale, 10) == 0.0
    assert skipped_of_timed(rows, [], 0) == 0.0


class Square(keras.layers.Layer):
    def call(self, x):
        return keras.ops.square(x)


def test_a_run_that_skips_all_of_its_steps_has_no_speed_of_training(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1)(Square()(inputs))
    model = keras.Model(inputs, outputs)
    scaled = kmp.LossScaleOptimizer("sgd")
    model.compile(scaled, "mse", jit_compile=BACKEND == "jax")
    x = np.full((ROWS * 100, 4), 1e3, "float32")
    watching = kmp.MixPrecMonitor(tmp_path, 10, 0, 1, verbose=0)
    model.fit(x, x[:, :1], ROWS, verbose=0, callbacks=[watching])
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    assert run["performance"]["speed"]["skipped"] == 1
    assert summary(run)["samples_per_second"] is None
    said = "with all of the timed steps skipped: no speed of training"
    for text in str(report), str(watching.summary):
        assert said in " ".join(text.split())
