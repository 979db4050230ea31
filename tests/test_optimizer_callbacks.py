"""Keras' callbacks that look into the optimizer work through the wrapper."""

import keras
import numpy as np
import pytest
from optimizer_models import BACKEND, numbers, only_tensorflow

from keras_mixprec import LossScaleOptimizer

X = np.linspace(-1, 1, 16, dtype="float32")[:, None]


def fit(callbacks, inner=None, epochs=2, targets=None):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    inner = inner or keras.optimizers.SGD(0.25)
    jit = {"jit_compile": False} if BACKEND != "jax" else {}
    model.compile(LossScaleOptimizer(inner), loss="mse", **jit)
    targets = X if targets is None else targets
    model.fit(
        X, targets, epochs=epochs, batch_size=4, verbose=0, callbacks=callbacks
    )
    return model


def test_learning_rate_scheduler():
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch)
    model = fit([schedule], epochs=3)
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.25


def test_reduce_on_plateau():
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=1e9
    )
    model = fit([plateau], epochs=4)
    assert float(model.optimizer.learning_rate) == 0.25 / 8


def test_swap_ema_weights():
    inner = keras.optimizers.SGD(0.25, use_ema=True, ema_momentum=0.5)
    model = fit([], inner, epochs=1)
    averages = numbers(inner._model_variables_moving_average)
    ones = [np.ones_like(w) for w in averages]
    model.set_weights(ones)
    swap = keras.callbacks.SwapEMAWeights()
    swap.set_model(model)
    swap.on_test_begin()
    # The callback swaps by adding and subtracting.
    for a, b in zip(numbers(model.weights), averages, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    swap.on_test_end()
    for a, b in zip(numbers(model.weights), ones, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_terminate_on_nan_sees_the_loss_unscaled():
    model = fit([keras.callbacks.TerminateOnNaN()])
    assert int(model.optimizer.iterations) == 8


@only_tensorflow
def test_tensorboard_writes_the_learning_rate_by_step(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    fit([keras.callbacks.TensorBoard(tmp_path, update_freq=1)])
    events = event_accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert "epoch_learning_rate" in tags
    assert [e.step for e in events.Tensors("batch_loss")] == list(range(1, 9))


def test_backup_and_restore(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    targets = X.copy()
    targets[[2, 9]] = np.nan
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit([backup, Interrupt()], epochs=4, targets=targets)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    optimizer = fit([backup], epochs=4, targets=targets).optimizer
    # Two bad batches of four in each of four epochs.
    assert optimizer.attempted_steps == 16
    assert optimizer.skipped_steps + int(optimizer.iterations) == 16
    assert float(optimizer.loss_scale) == 2.0**15 / 2**optimizer.skipped_steps
