"""Watched models and callbacks are saved, copied and used again as others."""

import copy
import inspect
import os
import pickle
import zipfile

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    JIT,
    OPTIMIZERS,
    arrays,
    each_optimizer,
    every_backend,
    fit,
    good,
    one_backend,
    one_weight,
    watched,
    with_bad,
)

import keras_mixprec as kmp

pytestmark = one_backend

VALUES = with_bad(good(4), 1)
load = keras.models.load_model


def watched_model(wrap, tmp_path):
    root = keras.metrics.RootMeanSquaredError(name="root")
    model = one_weight(wrap, JIT, metrics=["mse", root])
    return watched(tmp_path / "logs", VALUES, model).model


def saved(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return load(tmp_path / "model.keras")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(saved, "ours", marks=every_backend),
        pytest.param(saved, "keras", marks=every_backend),
        (saved, "auto"),
        (lambda model, _: pickle.loads(pickle.dumps(model)), "keras"),
        (lambda model, _: copy.deepcopy(model), "ours"),
    ],
)
def test_a_copy_is_a_model_of_its_own(name, make, tmp_path):
    model = watched_model(OPTIMIZERS[name], tmp_path)
    replay = make(model, tmp_path)
    optimizer = replay.optimizer
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**14
    assert int(optimizer.inner_optimizer.iterations.numpy()) == 3
    if name == "ours":
        assert type(optimizer) is kmp.LossScaleOptimizer
        assert optimizer.skipped_steps == 1
        assert not replay.evaluate(*arrays([BAD]), verbose=0)[0] < 1e30
    elif make is saved:  # Keras alone loads what had its optimizer.
        with zipfile.ZipFile(tmp_path / "model.keras") as file:
            assert b"keras_mixprec" not in file.read("config.json")
    before = model.get_metrics_result()
    history = watched(tmp_path / "logs", VALUES, replay).history
    assert np.isfinite(list(history.values())).all()
    assert model.get_metrics_result() == before
    assert int(model.optimizer.iterations.numpy()) == 3


def test_a_clone_is_compiled_otherwise(tmp_path):
    clone = keras.models.clone_model(
        watched_model(OPTIMIZERS["ours"], tmp_path)
    )
    clone.compile("sgd", "mae", jit_compile=False)
    assert clone.evaluate(*arrays([1 / 8]), verbose=0)[0] == 1 / 8


def test_a_metric_is_copied_without_its_guard(tmp_path):
    metric = keras.metrics.MeanSquaredError(name="error")
    model = watched(tmp_path, good(2), one_weight(metrics=[metric])).model
    replay = copy.deepcopy(metric)
    replay.update_state([[1.0]], [[0.0]])
    model.reset_metrics()
    assert (float(replay.result()), float(metric.result())) == (1.0, 0.0)
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert again.name == "error"


@each_optimizer
def test_a_checkpoint_in_every_epoch(wrap, tmp_path):
    path = str(tmp_path / "{epoch}.keras")
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    model = one_weight(wrap, JIT, metrics=["mse"])
    values = with_bad(good(6), 3)
    watched(tmp_path / "logs", values, model, checkpoint, epochs=3)
    loaded = [load(path.format(epoch=n)).optimizer for n in (1, 2, 3)]
    scales = [float(optimizer.dynamic_scale.numpy()) for optimizer in loaded]
    assert scales == [2.0**15, 2.0**14, 2.0**14]


# What every callback of the package bears.

CALLBACKS = [
    kind
    for kind in (getattr(kmp, name) for name in kmp.__all__)
    if inspect.isclass(kind) and issubclass(kind, keras.callbacks.Callback)
]
RESULTS = ("verdicts", "summary", "plan", "history", "log_dir")
ONE_EIGHTH = {"loss": [1 / 64]}


def each_kind(test):
    """For each callback, in a folder of its own."""
    each = pytest.mark.parametrize("kind", CALLBACKS)
    return pytest.mark.usefixtures("own_folder")(each(test))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trains(callback, model=None):
    """Whether it trains as without the callback."""
    history = fit(model or one_weight(), [1 / 8, 1 / 4], [callback])
    return history == {"loss": [5 / 128]}


@each_kind
@each_optimizer
def test_it_is_used_again(kind, wrap):
    callback, model = kind(), one_weight(wrap)
    x, y = arrays(good(2))
    none = {"verbose": 0, "callbacks": [callback]}
    model.fit(x, y, epochs=0, **none)
    model.fit(x, y, initial_epoch=3, epochs=2, **none)
    assert trains(callback, model)
    assert trains(callback, model)
    assert trains(callback)  # Another model.
    # Steps by hand.
    model.reset_metrics()  # As `train_on_batch` itself does from 3.14 on.
    assert model.train_on_batch(*arrays([1 / 8])) == 1 / 64
    model.reset_metrics()
    assert model.test_on_batch(*arrays([1 / 8])) == 1 / 64


@each_kind
def test_evaluate_and_predict(kind):
    model, callback = one_weight(), kind()
    x, y = arrays([1 / 8])
    kept = {"verbose": 0, "callbacks": [callback]}
    for _ in range(2):
        assert model.evaluate(x, y, **kept) == 1 / 64
        assert model.predict(x, **kept).tolist() == x.tolist()
        if _ == 0:
            assert os.listdir() == []
            assert trains(callback, model)


each_copy = pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))]
)


@each_kind
@each_copy
def test_used_callbacks_are_copied_with_their_results(kind, make):
    callback, model = kind(), one_weight()
    assert trains(make(callback))
    fit(model, [1 / 8, BAD], [callback])
    replay = make(callback)
    kept = [name for name in RESULTS if hasattr(callback, name)]
    assert len(kept) >= 2
    for name in kept:
        assert repr(getattr(replay, name)) == repr(getattr(callback, name))
    assert replay.model is None
    assert trains(replay)
    assert trains(copy.copy(callback))
    assert trains(callback, make(model))


@each_kind
@each_copy
def test_callbacks_are_copied_in_training(kind, make):
    callback, replays = kind(), []
    copying = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: replays.append(make(callback))
    )
    fit(one_weight(), [1 / 8, 1 / 4], [callback, copying])
    assert trains(replays[1])


@each_kind
@each_optimizer
def test_interrupted_training_goes_on(kind, wrap):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    model, callback = one_weight(wrap), kind()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [BAD, 1 / 8, 1 / 8, 1 / 8], [callback, Fails()])
    assert not model.evaluate(*arrays([1 / 8, BAD]), verbose=0) < 1e30
    assert trains(callback, model)
    assert trains(callback, model)
