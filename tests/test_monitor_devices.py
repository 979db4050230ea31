"""Several replicas of a model, one log."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    OPTIMIZERS,
    arrays,
    good,
    monitor,
    one_weight,
    scalars,
    told,
    with_bad,
)
from optimizer_models import only_jax, only_tensorflow

MIRRORED = """
import os
import sys
import tensorflow as tf
sys.path.insert(0, sys.argv[2])
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
from monitor_models import OPTIMIZERS, arrays, good, monitor, one_weight
from monitor_models import with_bad

x, y = arrays(good(6))
x[2 * 4 + 3] = 1e30  # The second replica's half of the third batch.
for name in "ours", "keras", "auto":
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = one_weight(OPTIMIZERS[name], metrics=["mse"])
    log_dir = os.path.join(sys.argv[1], name)
    history = model.fit(
        x, y, batch_size=4, shuffle=False, verbose=0, epochs=2,
        callbacks=[monitor(log_dir, update_freq=1)],
    ).history
    print(name, *history["loss"], *history["mse"])
"""


@only_tensorflow
def test_mirrored_strategy(tmp_path):
    here = os.path.dirname(__file__)
    answer = subprocess.run(
        [sys.executable, "-c", MIRRORED, tmp_path, here],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert [name for name, *_ in lines] == ["ours", "keras", "auto"]
    for name, *shown in lines:
        assert np.isfinite([float(value) for value in shown]).all()
        skipped = scalars(tmp_path / name, "skipped_steps")
        assert list(skipped.values()) == [*[0] * 3, *[1] * 6, *[2] * 4]


@pytest.fixture
def two_devices():
    distribution = keras.distribution.DataParallel(
        devices=keras.distribution.list_devices()[:2]
    )
    keras.distribution.set_distribution(distribution)
    yield
    keras.distribution.set_distribution(None)


@only_jax
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_data_parallel(name, two_devices, tmp_path):
    model = one_weight(OPTIMIZERS[name], True, metrics=["mse"])
    values = with_bad(good(6), 2)
    x, y = arrays(values)
    kept = {"batch_size": 4, "verbose": 0}
    model.evaluate(x, y, **kept)
    history = model.fit(
        x,
        y,
        shuffle=False,
        epochs=2,
        validation_data=(x, y),
        callbacks=[monitor(tmp_path, update_freq=1)],
        **kept,
    ).history
    mean = np.mean([v**2 for v in values if v != BAD])
    np.testing.assert_allclose(history["loss"], [mean] * 2, rtol=1e-6)
    np.testing.assert_allclose(history["mse"], [mean] * 2, rtol=1e-6)
    assert [e["at_step"] for e in told(tmp_path, "skipped_step")] == [3, 9]
