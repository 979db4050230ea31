"""Repairs under MirroredStrategy on two logical CPUs; prints "done"."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from tuned import BIG, GOOD, ROWS, chain, demoted
from tuner_models import CURE

import keras_mixprec as kmp

CPUS = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    CPUS[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def build(rate=0.0):
    with STRATEGY.scope():
        return chain(False, rate=rate)


def data(first, second):
    """Batches of which each replica gets one number."""
    pairs = np.array([first, second], "float32").T
    x = np.repeat(pairs.reshape(-1), ROWS)[:, None]
    return tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x))).batch(
        2 * ROWS
    )


def fit(model, dataset, *callbacks):
    return model.fit(
        dataset, verbose=0, shuffle=False, callbacks=list(callbacks)
    ).history


def fault_on_the_second_replica_at_first():
    model, tuner = build(), kmp.PrecisionTuner(verbose=0)
    fit(model, data([GOOD] * 6, [BIG] * 6), tuner)
    assert demoted(model) == CURE, demoted(model)
    assert [e["step"] for e in tuner.history] == [0]
    assert read(model.optimizer.iterations) == 6


def fault_on_the_second_replica_later():
    model, tuner = build(), kmp.PrecisionTuner(verbose=0)
    monitor = kmp.MixPrecMonitor(
        tempfile.mkdtemp(), keep_failing_batches=1, verbose=0
    )
    second = [GOOD] * 20 + [BIG] * 20
    fit(model, data([GOOD] * 40, second), monitor, tuner)
    assert demoted(model) == CURE, demoted(model)
    (step,) = [e["step"] for e in tuner.history]
    assert 20 < step <= 32, step
    assert read(model.optimizer.iterations) == 40 - (step - 20)
    x, _, _ = monitor.failing_batches[0].batch
    np.testing.assert_array_equal(x[:, 0], [GOOD] * ROWS + [BIG] * ROWS)


def keeping_monitor():
    return kmp.MixPrecMonitor(
        tempfile.mkdtemp(), keep_failing_batches=1, verbose=0
    )


def diagnosis_on_demand():
    model = build()
    x = np.full((4, 1), BIG, "float32")
    (first, *_) = kmp.diagnose(model, x, x * 0)
    assert (first.kind, first.layer) == ("forward_overflow", "big"), first
    fit(model, data([GOOD], [GOOD]))
    assert kmp.diagnose(model, x, x * 0)[0].layer == "big"


def a_healthy_run_is_the_same_run():
    plain, tuned = build(2.0**-20), build(2.0**-20)
    values = np.linspace(1.0, 2.0, 60)
    expected = fit(plain, data(values, values[::-1]))
    tuner = kmp.PrecisionTuner(verbose=0)
    assert fit(tuned, data(values, values[::-1]), tuner) == expected
    assert tuner.history == []
    for ours, theirs in zip(variables(tuned), variables(plain), strict=True):
        np.testing.assert_array_equal(read(ours), read(theirs))


def the_second_replica_may_run_out_first():
    model, tuner = build(), kmp.PrecisionTuner(verbose=0)
    x = np.full((9 * ROWS, 1), GOOD, "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(2 * ROWS)
    monitor = kmp.MixPrecMonitor(
        tempfile.mkdtemp(), keep_failing_batches=1, verbose=0
    )
    fit(model, dataset, monitor, tuner)
    assert read(model.optimizer.iterations) == 5


def variables(model):
    return [*model.weights, *model.optimizer.variables]


def read(variable):
    first, second = STRATEGY.experimental_local_results(variable.value)
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    return first.numpy()


if __name__ == "__main__":
    keras.config.set_dtype_policy("mixed_float16")
    fault_on_the_second_replica_at_first()
    fault_on_the_second_replica_later()
    diagnosis_on_demand()
    a_healthy_run_is_the_same_run()
    the_second_replica_may_run_out_first()
    print("done")
