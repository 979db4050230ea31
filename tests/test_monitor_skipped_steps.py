"""A skipped step spoils neither the logs of its epoch nor layer state."""

import math

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    JITS,
    OwnStep,
    arrays,
    dense,
    each_jit,
    each_optimizer,
    fit,
    good,
    monitor,
    one_weight,
    with_bad,
)

import keras_mixprec as kmp


@pytest.mark.long
@each_jit
@each_optimizer
def test_the_loss_is_the_mean_of_the_finite_batches(wrap, jit, tmp_path):
    model = one_weight(wrap, jit)
    squares = np.square(good(10)).reshape(2, 5)
    # First, middle and last of the first and the second epoch.
    for index, position in enumerate((0, 2, 4, 5, 7, 9)):
        values = with_bad(good(10), position)
        history = fit(model, values, [monitor(tmp_path)], epochs=2)
        finite = np.ma.array(squares)
        finite[divmod(position, 5)] = np.ma.masked
        np.testing.assert_allclose(
            history["loss"], finite.mean(axis=1), rtol=1e-6
        )
        assert model.optimizer.skipped_steps == index + 1


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("policy", "trained_in"),
    [("float32", None), ("mixed_bfloat16", None), ("mixed_float16", "float32")],
)
def test_where_no_step_is_skipped_nan_stays(policy, trained_in, jit, tmp_path):
    model = dense(inputs=1, policy=policy, jit=jit)
    if trained_in:
        kmp.apply_policy(model, trained_in)
    history = fit(model, with_bad(good(3), 1), [monitor(tmp_path)])
    assert not math.isfinite(history["loss"][0])


# What other callbacks see.


def epochs_of(levels, bad=()):
    """Three batches an epoch, all of one loss; `bad` ones overflow."""
    return with_bad([v for v in levels for _ in range(3)], *bad)


def test_an_epoch_of_skipped_steps_is_neither_best_nor_plateau(tmp_path):
    path = tmp_path / "{epoch}.weights.h5"
    saving = {"save_best_only": True, "save_weights_only": True}
    others = [
        keras.callbacks.ModelCheckpoint(path, "loss", **saving),
        keras.callbacks.EarlyStopping("loss", patience=2),
        keras.callbacks.ReduceLROnPlateau("loss", patience=2),
    ]
    model = one_weight(metrics=["accuracy"])
    model.optimizer.learning_rate = 2.0**-40
    callbacks = [*others, monitor(tmp_path / "logs")]
    values = epochs_of([BAD, 3 / 8, BAD, 2 / 8, BAD, 1 / 8])
    history = fit(model, values, callbacks, epochs=6)
    assert np.isposinf(history["loss"]).tolist() == [True, False] * 3
    assert np.isneginf(history["accuracy"]).tolist() == [True, False] * 3
    assert [callback.best for callback in others] == [1 / 64] * 3
    saved = {file.name[0] for file in tmp_path.glob("*.h5")}
    assert saved == {"1", "2", "4", "6"}
    assert float(model.optimizer.learning_rate) == 2.0**-40


class Shown(keras.callbacks.Callback):
    """Records the loss in the progress bar at each batch."""

    def __init__(self):
        super().__init__()
        self.loss, self.mae = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.loss.append(logs["loss"])
        self.mae.append(logs["mae"])


@pytest.mark.long
@each_jit
def test_until_a_good_batch_an_epoch_shows_zero(jit, tmp_path):
    shown, model = Shown(), one_weight(jit=jit, metrics=["mae"])
    values = epochs_of([1 / 8, 1 / 4, BAD, 1 / 2], bad=[0, 3, 4])
    callbacks = [monitor(tmp_path), shown]
    arguments = {"epochs": 4, "validation_data": arrays([1 / 32])}
    history = fit(model, values, callbacks, **arguments)
    # As Keras shows metrics that have seen nothing.
    expected = [0, 1 / 8, 1 / 8, 0, 0, 1 / 4, 0, 0, 0, *[1 / 2] * 3]
    np.testing.assert_array_equal(shown.mae, expected)
    np.testing.assert_array_equal(shown.loss, np.square(expected))
    np.testing.assert_array_equal(history["mae"], [1 / 8, 1 / 4, np.inf, 1 / 2])


@each_jit
@pytest.mark.parametrize("good_epochs", [0, 1])
def test_a_run_that_only_skips_is_ended(good_epochs, jit, tmp_path):
    shown, model = Shown(), one_weight(jit=jit, metrics=["mae"])
    values = epochs_of([1 / 8] * good_epochs + [BAD] * 4)
    ending = keras.callbacks.TerminateOnNaN()
    callbacks = [monitor(tmp_path, probe_every=1), shown, ending]
    fit(model, values, callbacks, epochs=good_epochs + 4)
    # One epoch of skips shows zeros, the next one that all failed.
    assert len(shown.loss) == 3 * good_epochs + 4
    assert np.isfinite(shown.loss[:-1]).all()
    assert math.isnan(shown.loss[-1])
    assert np.isfinite(model.get_weights()[0]).all()


# Once weights are lost, no batch shows a number any more.


class LosesWeights(keras.callbacks.Callback):
    """Makes them NaN before the third batch, and counts the batches."""

    batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.batches == 2:
            model = self.model
            model.set_weights([w * np.nan for w in model.get_weights()])
        self.batches += 1


def network(kind, jit):
    model, inner = kind(one_weight().layers), keras.optimizers.SGD(0.0)
    optimizer = kmp.LossScaleOptimizer(inner)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit)
    return model


@each_jit
@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
def test_lost_weights_end_a_run_at_once(kind, jit, tmp_path):
    losing = LosesWeights()
    ending = keras.callbacks.TerminateOnNaN()
    callbacks = [monitor(tmp_path), losing, ending]
    history = fit(network(kind, jit), [1 / 8] * 8, callbacks, epochs=2)
    assert losing.batches == 3
    assert np.isinf(list(history.values())).all()
    assert len(history["loss"]) == 1


@pytest.mark.long
@each_jit
def test_weights_that_a_checkpoint_restores_are_lost_no_more(jit, tmp_path):
    model = network(keras.Sequential, jit)
    model.set_weights([np.array([[np.nan]])])
    fit(model, [1 / 8] * 2, [monitor(tmp_path)])
    model.set_weights([np.array([[1.0]])])
    history = fit(model, [1 / 8, BAD], [monitor(tmp_path)])
    assert history["loss"] == [1 / 64]


# What layers write themselves.


def normalizing(jit):
    """Two float16 channels, each normalized over the batch."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Rescaling(1.0),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


def moving(model):
    return [v.numpy() for v in model.non_trainable_variables]


# Two batches, and an overflow in one channel of the second.
ROWS = [[1, 2], [3, 4], [1, 2], [3, 4], [1e30, 2], [3, 4], [1, 2], [3, 4]]


@pytest.mark.long
@each_jit
def test_a_skipped_step_leaves_the_moving_statistics(jit, tmp_path):
    model, watcher = normalizing(jit), monitor(tmp_path)
    fit(model, (np.array(ROWS, "float32"), np.zeros((8, 1))), [watcher])
    # From (0, 1) half of the way to mean 2, 3 and variance 1, 1, once.
    np.testing.assert_allclose(moving(model), [[1.0, 1.5], [1.0, 1.0]], 1e-3)
