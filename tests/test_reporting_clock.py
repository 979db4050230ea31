"""Steps by epochs and by time of training, as the page places them."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.reporting.clock import clock
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog


def begin(step, date):
    return {"kind": "train_begin", "step": step, "wall_time": date}


def test_time_between_two_fits_is_no_training():
    events = [begin(0, 100.0), begin(10, 9100.0)]
    found = clock([(10, 105.0), (20, 9102.0)], events)
    assert found["time"] == {"steps": [0, 10, 20], "values": [0.0, 5.0, 7.0]}
    assert found["epoch"] == {"steps": [0, 10, 20], "values": [0, 1, 2]}


@pytest.mark.parametrize("ended", [True, False])
def test_what_is_logged_before_a_fit_is_no_part_of_the_one_before(ended):
    end = {"kind": "train_end", "step": 100, "wall_time": 10.0}
    found = {"kind": "before_training", "step": 100, "wall_time": 86399.0}
    events = [begin(0, 0.0), *[end] * ended, found, begin(100, 86400.0)]
    ends = [(100, 10.0), (200, 86410.0)]
    found = clock(ends, events)["time"]
    assert found == {"steps": [0, 100, 200], "values": [0.0, 10.0, 20.0]}


def test_events_date_steps_where_no_epoch_ended():
    skip = {"kind": "skipped_step", "step": 6, "wall_time": 103.0}
    found = clock([], [begin(0, 100.0), skip])
    assert found["time"] == {"steps": [0, 6], "values": [0.0, 3.0]}
    assert found["epoch"] is None


def test_a_clock_that_is_set_back_leaves_steps_out():
    ends = [(10, 110.0), (20, 50.0), (30, 60.0)]
    found = clock(ends, [begin(0, 100.0)])["time"]
    assert all(np.diff(found["steps"]) > 0)
    assert all(np.diff(found["values"]) > 0)


@pytest.mark.parametrize("events", [[], [begin(5, 1.0)]])
def test_one_date_is_no_axis(events):
    assert clock([], events) == {"epoch": None, "time": None}


def overview(log_dir):
    ((name, folder),) = find_runs(str(log_dir)).items()
    return RunData(name, FileSource(folder)).overview()


def test_fit_logs_when_each_epoch_ended(tmp_path, clock):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: clock.wait(2.0)
    )
    monitor = kmp.MixPrecMonitor(str(tmp_path), verbose=0)
    x = np.ones((12, 3), "float32")
    for _ in range(2):
        model.fit(
            x,
            x[:, :2],
            batch_size=4,
            epochs=2,
            callbacks=[monitor, watch],
            verbose=0,
        )
    found = overview(tmp_path)["clock"]
    steps = [0, 3, 6, 9, 12]
    assert found["epoch"] == {"steps": steps, "values": [0, 1, 2, 3, 4]}
    at = np.interp(steps, found["time"]["steps"], found["time"]["values"])
    assert [*at] == [0.0, 6.0, 12.0, 18.0, 24.0]


def test_a_log_without_dates_has_no_such_axis(tmp_path):
    with RunLog(tmp_path) as log:
        log.scale_rows(0, [[0, 2.0**15, 0, 0]])
    assert overview(tmp_path)["clock"] == {"epoch": None, "time": None}
