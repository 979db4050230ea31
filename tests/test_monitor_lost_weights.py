"""A run that has lost its weights ends as it would without a monitor."""

import os

import keras
import numpy as np
import pytest
from monitor_models import BAD, each_jit, fit, monitor, one_weight

import keras_mixprec as kmp


class OwnStep(keras.Sequential):
    def train_step(self, *args):
        return super().train_step(*args)


class LosesWeights(keras.callbacks.Callback):
    """Makes them NaN before the third batch, and counts the batches."""

    batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.batches == 2:
            model = self.model
            model.set_weights([w * np.nan for w in model.get_weights()])
        self.batches += 1


def network(kind, jit):
    model = one_weight()
    model = kind(model.layers)
    inner = keras.optimizers.SGD(0.0)
    model.compile(
        kmp.LossScaleOptimizer(inner), "mse", metrics=["mae"], jit_compile=jit
    )
    return model


@each_jit
@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
def test_terminate_on_nan_sees_it_at_once(kind, jit, tmp_path):
    losing = LosesWeights()
    callbacks = [
        monitor(tmp_path),
        losing,
        keras.callbacks.TerminateOnNaN(),
    ]
    history = fit(network(kind, jit), [1 / 8] * 8, callbacks, epochs=2)
    assert losing.batches == 3
    assert np.isnan(list(history.values())).all()
    assert len(history["loss"]) == 1


@each_jit
def test_its_epoch_is_never_the_best(jit, tmp_path):
    path = os.path.join(tmp_path, "best.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(
        path, "loss", save_best_only=True, save_weights_only=True
    )
    losing = LosesWeights()
    losing.batches = -3  # In the second epoch.
    callbacks = [monitor(tmp_path), losing, checkpoint]
    levels = [1 / 4] * 3 + [1 / 8] * 3
    history = fit(network(keras.Sequential, jit), levels, callbacks, epochs=2)
    np.testing.assert_array_equal(history["loss"], [1 / 16, np.nan])
    assert checkpoint.best == 1 / 16


@each_jit
def test_weights_that_were_finite_from_a_checkpoint_on(jit, tmp_path):
    model = network(keras.Sequential, jit)
    model.set_weights([np.array([[np.nan]])])
    fit(model, [1 / 8] * 2, [monitor(tmp_path)])
    model.set_weights([np.array([[1.0]])])
    history = fit(model, [1 / 8, BAD], [monitor(tmp_path)])
    assert history["loss"] == [1 / 64]


@each_jit
def test_a_float32_model_reports_nan(jit, tmp_path):
    model = network(keras.Sequential, jit)
    kmp.apply_policy(model, "float32")
    history = fit(model, [1 / 8, BAD], [monitor(tmp_path)])
    assert not np.isfinite(history["loss"][0])
