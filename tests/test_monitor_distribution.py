"""Models on several devices; workers that stop together."""

import keras
import numpy as np
import pytest
import workers
from keras import layers
from monitor_models import dense, not_torch, only_jax, watched
from reporting_readers import read_heat

from keras_mixprec.formats import get_format
from keras_mixprec.metrics import PROBED

# As in `distribution/watched.py`.
STEPS, BROKE_UNTIL = 60, 30


@pytest.mark.long
def test_two_workers():
    first, second = workers.run_two_workers("watched")
    assert first == second
    assert first["healthy"]["steps"] == STEPS
    assert 5 <= first["unrecoverable"]["steps"] < BROKE_UNTIL
    # Only the second worker has the batches that overflow.
    assert "(found by worker 1" in first["unrecoverable"]["report"]
    assert "forward_overflow big" in first["unrecoverable"]["verdicts"]
    assert "worker" not in first["healthy"]["report"]


@pytest.mark.slow
@not_torch
def test_two_devices_have_one_log():
    workers.run("replicas_monitor.py")


def model_parallel(devices):
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout["wide/kernel"] = (None, "model")
    layout["wide/bias"] = ("model",)
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch"
    )


@only_jax
def test_ranges_on_two_devices(tmp_path):
    devices = keras.distribution.list_devices()[:2]
    keras.distribution.set_distribution(model_parallel(devices))
    try:
        wide = layers.Dense(6, name="wide", kernel_initializer="ones")
        still = {"optimizer": keras.optimizers.SGD(0.0), "rules": []}
        model = dense(wide, outputs=2, **still)
        x = np.arange(64, dtype="float32").reshape((16, 4))
        often = {"update_freq": 1, "probe_every": 1}
        run = watched(tmp_path, (x, np.zeros((16, 2))), model, **often)
    finally:
        keras.distribution.set_distribution(None)
    measured = run.scalars("mixprec_ranges/activation_headroom_bits")
    assert [*measured] == [1, 2, 3, 4]
    assert not run.told("probe_failed")
    # The last batch of four rows; each number the sum of one of them.
    table = read_heat(str(tmp_path / "mixprec"))[4]
    bits = dict(zip(PROBED, table[0], strict=True))
    largest = x[-1].astype("float64").sum()
    expected = np.log2(get_format("float16").maximum / largest)
    assert bits["activation_headroom_bits"] == pytest.approx(expected, rel=1e-6)
    assert bits["weight_headroom_bits"] == pytest.approx(np.log2(65504.0))
