"""Step time and samples a second, by a clock that is set."""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, monitor, not_torch, scalars, tags, told

import keras_mixprec as kmp
from keras_mixprec import _clock
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
    """Steps of a known length, by a clock that stands still otherwise."""

    def __init__(self, clock, pause=PAUSE, epoch_pause=0.0):
        super().__init__()
        self.clock, self.pause, self.epoch_pause = clock, pause, epoch_pause

    def on_train_batch_begin(self, batch, logs=None):
        self.clock.wait(self.pause)

    def on_epoch_end(self, epoch, logs=None):
        self.clock.wait(self.epoch_pause)


def small(**compiling):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    usual = {"loss": "mse", "jit_compile": BACKEND == "jax"}
    model.compile("sgd", **usual | compiling)
    return model


def batches(count, last=ROWS, key=None):
    for number in range(count):
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


def near(expected):
    return pytest.approx(expected, rel=1e-6)


def test_a_step_takes_what_the_clock_says(tmp_path, clock):
    pace = Pace(clock)
    found = figures(tmp_path, batches(STEPS), pace)
    for name in "step_time", "step_time_median":
        assert found[name] == near(PAUSE), name
    assert found["step_time_p95"] == near(PAUSE)
    assert found["samples_per_second"] == near(ROWS / PAUSE)
    curve = scalars(tmp_path, "mixprec_performance/step_time")
    assert min(curve.values()) == near(PAUSE)
    assert set(curve) >= {20, 30, 40, 50}
    names = "step_time", "step_time_median", "step_time_p95", "overhead_share"
    wanted = {*names, "samples_per_second", "00000"}
    found = {t.partition("/")[2] for t in tags(tmp_path) if "performance/" in t}
    assert found - {"00001"} == wanted


def test_a_run_without_a_budget_is_timed_as_well(tmp_path):
    watching = monitor(tmp_path, max_overhead=0.0)
    arguments = {"callbacks": [watching], "verbose": 0, "shuffle": False}
    small().fit(batches(20), **arguments)
    # The first wait ends a stretch of eight, wherever the device is by then.
    assert logged(tmp_path)["step_time"] > 0


def test_what_is_between_epochs_is_no_part_of_a_step(tmp_path, clock):
    x = np.ones((ROWS * 12, 4), "float32")
    validation = {"validation_data": (x, x[:, :1])}
    pace = Pace(clock, epoch_pause=20 * PAUSE)
    arguments = {"y": x[:, :1], "batch_size": ROWS, "epochs": 4} | validation
    found = figures(tmp_path, x, pace, **arguments)
    assert found["step_time"] == near(PAUSE)
    assert found["samples_per_second"] == near(ROWS / PAUSE)


@pytest.mark.parametrize("known", [True, False])
def test_a_smaller_last_batch_does_not_count_as_a_whole_one(
    tmp_path, known, clock
):
    pace = Pace(clock)
    arguments = {"steps_per_epoch": 25} if known else {}
    found = figures(tmp_path, batches(25, last=1), pace, **arguments)
    rate = found["samples_per_second"] * found["step_time"]
    assert rate == pytest.approx(ROWS, rel=0.1)


@not_torch
def test_steps_of_one_execution_are_counted_each(tmp_path, clock):
    pace = Pace(clock)
    model = small(steps_per_execution=4)
    found = figures(
        tmp_path, batches(80), pace, model=model, steps_per_epoch=80
    )
    assert found["step_time"] == near(PAUSE / 4)
    assert found["samples_per_second"] == near(4 * ROWS / PAUSE)


def test_samples_of_a_dict_are_counted(tmp_path, clock):
    inputs = keras.Input((4,), name="a")
    model = keras.Model({"a": inputs}, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    pace = Pace(clock)
    found = figures(tmp_path, batches(40, key="a"), pace, model=model)
    assert found["samples_per_second"] == near(ROWS / PAUSE)
    assert found["flops_in_16_bits"] == 0  # Without a counter to read.


def test_of_a_batch_of_graphs_the_graphs_are_counted(tmp_path, clock):
    nodes, edges = keras.Input((4,)), keras.Input((2,))
    ends = keras.layers.Dense(1)(edges)
    graphs = keras.ops.mean(keras.ops.reshape(nodes, (-1, 3, 4)), axis=1)
    outputs = keras.layers.Dense(1)(graphs) + keras.ops.mean(ends)
    model = keras.Model([nodes, edges], outputs)
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    x = np.ones((3 * ROWS, 4), "float32"), np.ones((7 * ROWS, 2), "float32")
    data = ((x, np.ones((ROWS, 1), "float32")) for _ in range(40))
    pace = Pace(clock)
    found = figures(tmp_path, data, pace, model=model)
    assert found["samples_per_second"] == near(ROWS / PAUSE)


def test_a_loop_by_hand_is_timed(tmp_path, clock):
    model, pace = small(), Pace(clock)
    watching = monitor(tmp_path, update_freq=10)
    callbacks = keras.callbacks.CallbackList([watching, pace], model=model)
    callbacks.on_train_begin()
    for number, batch in enumerate(batches(40)):
        callbacks.on_train_batch_begin(number)
        model.train_on_batch(*batch)
    callbacks.on_train_end()
    assert logged(tmp_path)["step_time"] == near(PAUSE)


def test_the_last_fit_is_what_counts(tmp_path, clock):
    for pause in 4 * PAUSE, PAUSE:
        pace = Pace(clock, pause)
        found = figures(tmp_path, batches(25), pace)
        assert found["step_time"] == near(pause)


def test_probes_and_their_compilation_are_no_steps(tmp_path, clock):
    pace, model = Pace(clock), small()
    watching = monitor(tmp_path, update_freq=10, probe_every=7)
    x = np.ones((ROWS * STEPS, 4), "float32")
    model.fit(
        x, x[:, :1], ROWS, epochs=2, verbose=0, callbacks=[watching, pace]
    )
    assert told(tmp_path, "probe_compiled")
    found = logged(tmp_path)
    assert found["step_time"] == near(PAUSE)
    assert found["output_bytes_saved"] == 0.5


def test_a_step_takes_one_time_stamp(clock):
    asked = []
    with _clock.set_to(lambda: asked.append(1) or clock.read()):
        run(step_clock(clock), behind=False, steps=STEPS)
    # Another for the end of the stretch.
    assert len(asked) <= STEPS + 2


def test_the_report_has_it_in_a_line(tmp_path):
    watching = monitor(tmp_path, update_freq=10)
    small().fit(batches(30), shuffle=False, verbose=0, callbacks=[watching])
    line = str(watching.report).partition("\nSpeed: ")[2].partition(".\n")[0]
    assert "a step" in line
    assert line.startswith(watching.summary.speed[:32])


# On a device that runs behind the host, by a clock that the test moves.


def step_clock(clock):
    budget = SimpleNamespace(special=0)
    samples = SimpleNamespace(total=0)
    model = SimpleNamespace(train_function="f")
    return clock, StepClock(model, budget, samples, lambda: None, 0)


def run(clocks, behind, steps=21):
    """Enqueues a step in 1 ms, which takes the device 10 ms if it is behind."""
    clock, steps_clock = clocks
    for step in range(steps):
        steps_clock.stamp(step)
        clock.wait(0.001)
    steps_clock.stamp(steps)
    waited = 0.009 * (steps - 1) if behind else 0.0
    clock.wait(waited)
    steps_clock.waited(steps, waited)
    return steps_clock.take()


def test_what_the_host_enqueues_is_not_taken_for_a_step(clock):
    clocks = step_clock(clock)
    stretch, durations = run(clocks, behind=True)
    assert stretch.seconds / stretch.steps == pytest.approx(0.01)
    assert stretch.steps == 20  # The first compiles.
    assert durations == []
    assert clocks[1].behind
    _, durations = run(clocks, behind=False)
    assert durations == pytest.approx([0.001] * 21)  # Now they are seen.


def test_what_the_host_has_seen_end_is_listed(clock):
    stretch, durations = run(step_clock(clock), behind=False)
    assert durations == pytest.approx([0.001] * 20)
    assert stretch.seconds == pytest.approx(0.02)


def row(step, steps, median, p95):
    return Row(step, steps, steps * median, steps, median, p95, 1, 0, 0.1, 1)


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
    assert sentence(found).startswith("1 s a step (measured on 9")


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
    assert said in " ".join(str(report).split())
