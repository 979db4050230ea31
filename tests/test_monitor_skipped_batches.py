"""A skipped step does not poison its epoch for the other callbacks."""

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

from keras_mixprec.callbacks.metric_guard import WORST
from keras_mixprec.callbacks.watching import guard_of

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


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_do_as_without_the_batch(make, order, tmp_path):
    levels = [3 / 8, 2 / 8, 1 / 8, 2 / 8, 2 / 8, 2 / 8]
    results = []
    for name, bad in ("plain", ()), ("skipping", (0, 4, 8, 11, 12)):
        folder = tmp_path / name
        folder.mkdir()
        results.append(outcome(make, levels, bad, order, folder))
    assert results[0] == results[1]


@each_jit
def test_an_epoch_of_bad_batches_reports_the_maximum(jit, tmp_path):
    values = [1 / 8, 1 / 8, BAD, BAD, 1 / 16, 1 / 16]
    model = one_weight(jit=jit)
    history = fit(model, values, [monitor(tmp_path)], epochs=3)
    assert history["loss"] == [1 / 64, WORST, 1 / 256]
    assert np.finfo("float32").max == WORST


@each_jit
def test_a_model_compiled_anew_counts_on(jit, tmp_path):
    model = one_weight(jit=jit)
    for fits in 1, 2:
        history = fit(model, [BAD, BAD], [monitor(tmp_path)])
        assert history["loss"] == [WORST]
        assert guard_of(model).nonfinite_losses == 2 * fits
        model.compile(model.optimizer, "mse", jit_compile=jit)


def test_an_epoch_of_bad_batches_is_never_the_best(tmp_path):
    checkpoint = CALLBACKS["ModelCheckpoint"](str(tmp_path))
    levels = [BAD, 2 / 8, BAD, 1 / 8]
    callbacks = [monitor(tmp_path / "logs"), checkpoint]
    fit(one_weight(), epochs_of(levels), callbacks, epochs=4)
    assert checkpoint.best == 1 / 64
    saved = {n[0] for n in os.listdir(tmp_path) if n.endswith(".h5")}
    assert saved >= {"2", "4"}
    assert "3" not in saved


@each_jit
@each_optimizer
def test_validation_tells_the_whole_truth(wrap, jit, tmp_path):
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
def test_evaluating_afterwards_tells_the_whole_truth(jit, tmp_path):
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
