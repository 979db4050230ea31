"""Metrics that float16 makes infinite, though the loss is finite."""

import keras
import numpy as np
from monitor_models import each_jit, monitor, told

import keras_mixprec as kmp

# The error of a prediction of 1 is 1e5 of the smallest of these targets, which
# is 1e7%: beyond float16, where the loss is at most 4.
TARGETS = np.array([[1e-5], [1.0], [2.0], [1e-5]], "float32")


def run(log_dir, jit, last=None, mape="mape", **data):
    keras.backend.clear_session()
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, kernel_initializer="ones", dtype=last)
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1.0),
        loss="mse",
        metrics=["mae", mape],
        jit_compile=jit,
    )
    ones = np.ones((4, 1), "float32")
    watching = monitor(log_dir)
    history = model.fit(
        ones,
        data.pop("y", TARGETS),
        epochs=2,
        verbose=0,
        callbacks=[watching],
        **data,
    ).history
    return watching.summary, history, told(log_dir, "metric_not_finite")


@each_jit
def test_it_is_told_once(tmp_path, jit):
    summary, history, (event,) = run(tmp_path, jit)
    assert history["mape"][-1] == np.inf
    assert np.isfinite(history["loss"]).all()
    assert event["metrics"] == {"mape": "inf"}
    assert "metric mape was inf" in str(summary)
    assert summary.headline["state"] == "warning"


@each_jit
def test_on_validation_data_as_well(tmp_path, jit):
    ones = np.ones((4, 1), "float32")
    data = {"y": ones, "validation_data": (ones, TARGETS)}
    _, history, events = run(tmp_path, jit, **data)
    assert np.isfinite(history["mape"]).all()
    assert not events
    (event,) = told(tmp_path, "validation_not_finite")
    assert event["metrics"] == {"mape": "inf"}
    (verdict,) = told(tmp_path, "verdict")
    assert verdict["numbers"]["metric"] == "mape"


@each_jit
def test_its_advice_mends_it(tmp_path, jit):
    _, history, events = run(tmp_path, jit, last="float32")
    # 1e5 of two of four targets, in percent.
    np.testing.assert_allclose(history["mape"], 100 * 1e5 / 2, rtol=1e-3)
    assert not events


@each_jit
def test_what_is_infinite_in_float32_is_not_told(tmp_path, jit):
    def mape(y_true, y_pred):
        return y_pred / 0.0

    _, history, events = run(tmp_path, jit, last="float32", mape=mape)
    assert np.isfinite(history["loss"]).all()
    assert history["mape"] == [np.inf, np.inf]
    assert not events
