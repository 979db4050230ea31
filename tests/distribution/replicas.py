"""Two devices of one process: `MirroredStrategy`, or JAX' `DataParallel`.

TensorFlow fixes its logical devices when it starts, so the test runner, which
has started it, cannot have two.
"""

import contextlib

import keras
import numpy as np
from tuned import ROWS

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"

if IS_TENSORFLOW:
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    scope = STRATEGY.scope

    def replicas(variable):
        """Returns what each device holds of a variable."""
        values = STRATEGY.experimental_local_results(variable.value)
        return [value.numpy() for value in values]

else:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    scope = contextlib.nullcontext

    def replicas(variable):
        """Returns what each device holds of a variable."""
        return [np.asarray(s.data) for s in variable.value.addressable_shards]


def value(variable):
    """Returns the value of a variable that is the same on both devices."""
    first, second = replicas(variable)
    assert first.tobytes() == second.tobytes(), variable.path
    return first


def in_pairs(first, second):
    """Returns batches that give each device `ROWS` rows of one number."""
    pairs = np.array([first, second], "float32").T
    x = np.repeat(pairs.reshape(-1), ROWS)[:, None]
    return x, np.zeros_like(x)


def fit(model, x, y, *callbacks):
    """Trains on batches of `ROWS` rows for each device; returns history."""
    return model.fit(
        x,
        y,
        batch_size=2 * ROWS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history
