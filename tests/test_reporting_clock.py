"""The time of training until a step, as the page tells it."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.reporting.clock import time_of_training

pytestmark = pytest.mark.one_backend


def at(step, date, kind="train_begin"):
    return {"kind": kind, "step": step, "wall_time": date}


FIRST = at(0, 100.0)
NEXT_DAY = [at(100, 86399.0, "before_training"), at(100, 86400.0)]


@pytest.mark.parametrize(
    ("ends", "events", "time"),
    [
        # Time between two fits is no training.
        (
            [(10, 105.0), (20, 9102.0)],
            [FIRST, at(10, 9100.0)],
            {0: 0.0, 10: 5.0, 20: 7.0},
        ),
        # What is logged before a fit is no part of the one before.
        (
            [(100, 110.0), (200, 86410.0)],
            [FIRST, at(100, 110.0, "train_end"), *NEXT_DAY],
            {0: 0.0, 100: 10.0, 200: 20.0},
        ),
        # Events date steps where no epoch ended.
        ([], [FIRST, at(6, 103.0, "skipped_step")], {0: 0.0, 6: 3.0}),
        # One date is no time.
        ([], [at(5, 1.0)], None),
    ],
)
def test_time_of_training(ends, events, time):
    found = time_of_training(ends, events)
    if found:
        found = dict(zip(*found.values(), strict=True))
    assert found == time


def test_fit_logs_when_each_epoch_ended(tmp_path, clock):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    wait = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: clock.wait(1.0),
        on_train_end=lambda logs: clock.wait(100.0),
    )
    monitor = kmp.MixPrecMonitor(str(tmp_path), verbose=0)
    x = np.ones((12, 3), "float32")
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    for _ in range(2):
        model.fit(x, x[:, :2], callbacks=[wait, monitor], **options)
    (run,) = monitor.report.to_dict().values()
    steps = [0, 3, 6, 9, 12]
    dates = dict(zip(*run["time"].values(), strict=True))
    assert [dates[step] for step in steps] == steps
