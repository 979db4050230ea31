"""A probed step of MirroredStrategy on two logical CPUs; prints "done"."""

import keras
import numpy as np
import tensorflow as tf

from keras_mixprec import LossScaleOptimizer
from keras_mixprec.numerics.probed_step import Probe

CPUS = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    CPUS[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
X = np.arange(1, 9, dtype="float32")[:, None]


def build():
    with STRATEGY.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, None, False, "ones")]
        )
        model.compile(
            LossScaleOptimizer(keras.optimizers.SGD(1e-3), 8.0),
            loss="mse",
            jit_compile=False,
        )
    return model


def train(probing):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = build()
    model.fit(X, X * 0, batch_size=8, verbose=0)
    if probing:
        probe = Probe(model)
        model.train_function = probe.train_function
        model.fit(X, X * 0, batch_size=8, verbose=0)
        return model.get_weights(), {r.path: r for r in probe.read()}
    model.fit(X, X * 0, batch_size=8, verbose=0)
    return model.get_weights(), {}


weights, readings = train(True)
plain, _ = train(False)
np.testing.assert_array_equal(weights, plain)
parts = readings["dense"].parts
# Both replicas: the second saw the largest input, the first the smallest.
assert parts["activation"].size == 8, parts["activation"].size
assert 7.5 < parts["activation"].largest < 8
assert readings["dense"].lost_updates == 0.0
print("done")
