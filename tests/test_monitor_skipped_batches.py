"""A skipped step does not poison its epoch for the other callbacks."""

import dataclasses
import gc
import math
import os

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    arrays,
    each_jit,
    each_optimizer,
    fit,
    good,
    monitor,
    one_weight,
    with_bad,
)

from keras_mixprec.monitoring.attach import guard_of

# Five batches an epoch: first, middle, last of the first and second epoch.
POSITIONS = (0, 2, 4, 5, 7, 9)


def mean_losses(values, epochs):
    per_epoch = np.reshape(values, (epochs, -1)).astype("float64") ** 2
    good_ones = np.ma.masked_greater(per_epoch, 1.0)
    return good_ones.mean(axis=1).tolist()


@each_jit
@each_optimizer
def test_loss_is_the_mean_of_the_finite_batches(wrap, jit, tmp_path):
    model = one_weight(wrap, jit)
    for index, position in enumerate(POSITIONS):
        values = with_bad(good(10), position)
        history = fit(model, values, [monitor(tmp_path)], epochs=2)
        np.testing.assert_allclose(
            history["loss"], mean_losses(values, 2), rtol=1e-6
        )
        assert model.optimizer.skipped_steps == index + 1


def epochs_of(levels, bad=()):
    """Three batches an epoch, all of one loss; `bad` ones overflow."""
    return with_bad([v for v in levels for _ in range(3)], *bad)


def outcome(make, levels, bad, order, tmp_path):
    """What is left of a callback and a model after a run."""
    callback = make(str(tmp_path))
    callbacks = [callback]
    if bad:
        callbacks = [monitor(tmp_path / "logs"), callback][::order]
    model = one_weight(keras.optimizers.LossScaleOptimizer)
    model.optimizer.learning_rate = 2.0**-40  # Moves nothing, can be cut.
    values = epochs_of(levels, bad)
    history = fit(model, values, callbacks, epochs=len(levels))
    kept = ("best", "wait", "stopped_epoch", "best_epoch")
    return (
        {name: vars(callback).get(name) for name in kept},
        history["loss"],
        float(model.optimizer.learning_rate),
        sorted(n for n in os.listdir(tmp_path) if n.endswith(".h5")),
    )


CALLBACKS = {
    "EarlyStopping": lambda folder: keras.callbacks.EarlyStopping(
        "loss", patience=2
    ),
    "ReduceLROnPlateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        "loss", patience=1
    ),
    "ModelCheckpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        os.path.join(folder, "{epoch}.weights.h5"),
        "loss",
        save_best_only=True,
        save_weights_only=True,
    ),
    "TerminateOnNaN": lambda folder: keras.callbacks.TerminateOnNaN(),
}


FIRST_OR_LAST = pytest.mark.parametrize(
    "order",
    [
        pytest.param(1, id="first", marks=pytest.mark.slow),
        pytest.param(-1, id="last"),
    ],
)


@FIRST_OR_LAST
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_as_without_the_batch(name, order, tmp_path):
    levels = [3 / 8, 2 / 8, 1 / 8, 2 / 8, 2 / 8, 2 / 8]
    make, results = CALLBACKS[name], []
    skipped = [0, 4, 8, 11, 12]
    if name == "TerminateOnNaN":
        skipped.remove(0)  # Before a run's first finite loss, NaN is true.
    for name, bad in ("plain", ()), ("skipping", skipped):
        folder = tmp_path / name
        folder.mkdir()
        results.append(outcome(make, levels, bad, order, folder))
    assert results[0] == results[1]


class Shown(keras.callbacks.Callback):
    """What the progress bar shows at each batch."""

    def __init__(self):
        super().__init__()
        self.loss, self.mae = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.loss.append(logs["loss"])
        self.mae.append(logs["mae"])


@each_jit
def test_until_a_good_batch_the_epoch_before_is_shown(jit, tmp_path):
    shown, model = Shown(), one_weight(jit=jit, metrics=["mae"])
    values = epochs_of([1 / 8, 1 / 4, BAD, 1 / 2], bad=[0, 3, 4])
    data = arrays([1 / 32])
    callbacks = [monitor(tmp_path), shown]
    fit(model, values, callbacks, epochs=4, validation_data=data)
    expected = [np.nan, *[1 / 8] * 4, *[1 / 4] * 4, 1 / 2, 1 / 2, 1 / 2]
    np.testing.assert_array_equal(shown.mae, expected)
    np.testing.assert_array_equal(shown.loss, np.square(expected))


@each_jit
@pytest.mark.parametrize("good_epochs", [0, 1])
def test_a_run_that_only_skips_is_ended(good_epochs, jit, tmp_path):
    shown, model = Shown(), one_weight(jit=jit, metrics=["mae"])
    values = epochs_of([1 / 8] * good_epochs + [BAD] * 4)
    ending = keras.callbacks.TerminateOnNaN()
    callbacks = [monitor(tmp_path), shown, ending]
    fit(model, values, callbacks, epochs=good_epochs + 4)
    # One epoch of skips shows what was before, the next one that it was NaN.
    assert len(shown.loss) == 6 * good_epochs + 1
    assert np.isfinite(shown.loss[:-1]).all()
    assert math.isnan(shown.loss[-1])
    assert np.isfinite(model.get_weights()[0]).all()


@each_jit
def test_an_epoch_of_bad_batches_reports_nan(jit, tmp_path):
    values = [1 / 8, 1 / 8, BAD, BAD, 1 / 16, 1 / 16]
    model = one_weight(jit=jit)
    history = fit(model, values, [monitor(tmp_path)], epochs=3)
    np.testing.assert_array_equal(history["loss"], [1 / 64, np.nan, 1 / 256])


@each_jit
def test_a_recompiled_model_counts_on(jit, tmp_path):
    model = one_weight(jit=jit)
    for fits in 1, 2:
        history = fit(model, [BAD, BAD], [monitor(tmp_path)])
        assert math.isnan(history["loss"][0])
        counts = guard_of(model).nonfinite_losses
        assert sum(counts.values()) == 2 * fits
        model.compile(model.optimizer, "mse", jit_compile=jit)


# Three epochs in which every step is skipped, the first one among them.
SKIPPED = [BAD, 3 / 8, BAD, 2 / 8, BAD, 1 / 8]


@FIRST_OR_LAST
def test_a_skipped_epoch_is_never_the_best(order, tmp_path):
    checkpoint = CALLBACKS["ModelCheckpoint"](str(tmp_path))
    callbacks = [monitor(tmp_path / "logs"), checkpoint][::order]
    fit(one_weight(), epochs_of(SKIPPED), callbacks, epochs=6)
    assert checkpoint.best == 1 / 64
    saved = {n[0] for n in os.listdir(tmp_path) if n.endswith(".h5")}
    assert saved == {"1", "2", "4", "6"}


@FIRST_OR_LAST
def test_a_skipped_epoch_is_no_plateau(order, tmp_path):
    stopping = CALLBACKS["EarlyStopping"]("")
    reducing = keras.callbacks.ReduceLROnPlateau("loss", patience=2)
    callbacks = [monitor(tmp_path), stopping, reducing][::order]
    model = one_weight()
    model.optimizer.learning_rate = 2.0**-40
    history = fit(model, epochs_of(SKIPPED), callbacks, epochs=6)
    assert len(history["loss"]) == 6
    assert stopping.best == reducing.best == 1 / 64
    assert float(model.optimizer.learning_rate) == 2.0**-40


@dataclasses.dataclass
class Settings(keras.callbacks.EarlyStopping):
    """Compares by value, so that no set holds it."""

    patience_in_epochs: int = 2

    def __post_init__(self):
        super().__init__("loss", patience=self.patience_in_epochs)


def test_a_callback_that_cannot_be_hashed_is_sought_as_well(tmp_path):
    stopping = Settings()
    callbacks = [monitor(tmp_path), stopping]
    fit(one_weight(), epochs_of([BAD, 3 / 8]), callbacks, epochs=2)
    assert stopping.best == 9 / 64


def test_callbacks_are_sought_once_in_a_fit(tmp_path, monkeypatch):
    sought, find = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: sought.append(1) or find())
    stopping = CALLBACKS["EarlyStopping"]("")
    callbacks = [monitor(tmp_path), stopping]
    fit(one_weight(), [BAD] * 4, callbacks, epochs=4)
    assert len(sought) == 1
    assert stopping.best is None


def test_a_skipped_epoch_ends_no_checkpoints_of_later_fits(tmp_path):
    checkpoint = CALLBACKS["ModelCheckpoint"](str(tmp_path))
    model = one_weight()
    for level in BAD, 1 / 8:
        callbacks = [monitor(tmp_path / "logs"), checkpoint]
        fit(model, epochs_of([level]), callbacks)
    assert checkpoint.best == 1 / 64


def test_validation_that_is_nan_stays_the_best(tmp_path):
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=9)
    callbacks = [monitor(tmp_path), stopping]
    data = np.full((4, 1), np.nan), np.zeros((4, 1))
    fit(one_weight(), [BAD, 1 / 8], callbacks, epochs=2, validation_data=data)
    assert math.isnan(stopping.best)


@each_jit
@each_optimizer
def test_validation_reports_every_batch(wrap, jit, tmp_path):
    history = fit(
        one_weight(wrap, jit),
        with_bad(good(6), 1),
        [monitor(tmp_path)],
        epochs=2,
        validation_data=arrays([1 / 8, BAD]),
    )
    assert np.isfinite(history["loss"]).all()
    assert np.isnan(history["val_loss"]).all() or (
        np.isinf(history["val_loss"]).all()
    )


@each_jit
def test_evaluating_afterwards_reports_every_batch(jit, tmp_path):
    model = one_weight(jit=jit)
    fit(model, with_bad(good(3), 1), [monitor(tmp_path)])
    assert not math.isfinite(model.evaluate(*arrays([1 / 8, BAD]), verbose=0))
    assert model.evaluate(*arrays([1 / 8]), verbose=0) == 1 / 64


@each_jit
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_without_skipping_nan_stays(policy, jit, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit)
    history = fit(model, with_bad(good(3), 1), [monitor(tmp_path)])
    assert not math.isfinite(history["loss"][0])
