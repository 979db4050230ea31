"""What layers write themselves, beside a skipped step."""

import keras
import numpy as np
from monitor_models import each_jit, monitor

import keras_mixprec as kmp
from keras_mixprec.monitoring.attach import guard_of


def normalizing(jit, channels=2):
    """float16 channels, each normalized over the batch."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((channels,)),
            keras.layers.Rescaling(1.0),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
        loss="mse",
        jit_compile=jit,
    )
    return model


def moving(model):
    return [v.numpy() for v in model.non_trainable_variables]


def train(model, x, callbacks):
    data = np.asarray(x, "float32")
    model.fit(
        data,
        np.zeros((len(data), 1)),
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


GOOD = [[1, 2], [3, 4], [1, 2], [3, 4]]
HALF_BAD = [[1e30, 2], [3, 4], [1, 2], [3, 4]]


@each_jit
def test_an_overflow_leaves_the_moving_statistics_finite(jit, tmp_path):
    model = normalizing(jit)
    train(model, GOOD + HALF_BAD, [monitor(tmp_path)])
    # From (0, 1) half of the way to mean 2, 3 and variance 1, 1; then the
    # second channel once more, and the first not at all.
    np.testing.assert_allclose(
        moving(model), [[1.0, 1.5 / 2 + 3 / 2], [1.0, 1.0]], rtol=1e-3
    )


@each_jit
def test_without_an_overflow_the_statistics_are_the_same_bits(jit, tmp_path):
    known, watched = normalizing(jit), normalizing(jit)
    train(known, GOOD * 2, [])
    train(watched, GOOD * 2, [monitor(tmp_path)])
    np.testing.assert_array_equal(moving(watched), moving(known))


@each_jit
def test_outside_of_training_anything_can_be_written(jit, tmp_path):
    model = normalizing(jit)
    train(model, GOOD, [monitor(tmp_path)])
    model.layers[1].moving_mean.assign([np.inf, 0.0])
    assert np.isinf(moving(model)[0][0])


@each_jit
def test_losses_that_are_not_finite_are_counted(jit, tmp_path):
    model = normalizing(jit)
    train(model, GOOD, [monitor(tmp_path)])
    assert sum(guard_of(model).nonfinite_losses.values()) == 0
    train(model, HALF_BAD * 3 + GOOD, [monitor(tmp_path)])
    assert sum(guard_of(model).nonfinite_losses.values()) == 3
    model.evaluate(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert sum(guard_of(model).nonfinite_losses.values()) == 3
