"""What every callback of the package bears, whichever comes."""

import copy
import inspect
import os
import pickle

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    arrays,
    each_optimizer,
    fit,
    good,
    one_weight,
)

import keras_mixprec as kmp

JIT = BACKEND == "jax"
CALLBACKS = [
    kind
    for kind in (getattr(kmp, name) for name in kmp.__all__)
    if inspect.isclass(kind) and issubclass(kind, keras.callbacks.Callback)
]
pytestmark = pytest.mark.parametrize(
    "kind", CALLBACKS, ids=[kind.__name__ for kind in CALLBACKS]
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(callback, model=None, values=(1 / 8, 1 / 4)):
    model = model or one_weight(jit=BACKEND == "jax")
    return model, fit(model, list(values), [callback])


@each_optimizer
def test_two_fits(kind, wrap):
    callback, model = kind(), one_weight(wrap, BACKEND == "jax")
    for _ in range(2):
        history = trained(callback, model)[1]
        assert history == {"loss": [5 / 128]}


def test_another_model(kind):
    callback = kind()
    assert trained(callback)[1] == trained(callback)[1]


def test_no_epochs(kind):
    model, callback = one_weight(), kind()
    x, y = arrays(good(2))
    model.fit(x, y, epochs=0, verbose=0, callbacks=[callback])
    model.fit(x, y, initial_epoch=3, epochs=2, verbose=0, callbacks=[callback])
    assert trained(callback, model)[1] == {"loss": [5 / 128]}


def test_evaluate_and_predict(kind):
    model, callback = one_weight(jit=BACKEND == "jax"), kind()
    x, y = arrays([1 / 8])
    kept = {"verbose": 0, "callbacks": [callback]}
    assert model.evaluate(x, y, **kept) == 1 / 64
    assert model.predict(x, **kept).tolist() == x.tolist()
    assert os.listdir() == []
    trained(callback, model)
    assert model.evaluate(x, y, **kept) == 1 / 64
    assert model.predict(x, **kept).tolist() == x.tolist()


def test_copies_work_apart(kind):
    first = kind()
    second = copy.copy(first)
    assert trained(second)[1] == trained(first)[1]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}
each_copy = pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)


@each_copy
def test_unused_callbacks_are_copied(kind, make):
    assert trained(make(kind()))[1] == {"loss": [5 / 128]}


RESULTS = ("verdicts", "summary", "plan", "history", "log_dir")


@each_copy
def test_used_callbacks_are_copied_with_their_results(kind, make):
    callback = kind()
    model, _ = trained(callback, values=(1 / 8, BAD))
    replay = make(callback)
    kept = [name for name in RESULTS if hasattr(callback, name)]
    assert len(kept) >= 2
    for name in kept:
        assert repr(getattr(replay, name)) == repr(getattr(callback, name))
    assert replay.model is None
    assert trained(replay)[1] == {"loss": [5 / 128]}
    assert trained(callback, make(model))[1] == {"loss": [5 / 128]}


@each_copy
def test_callbacks_are_copied_in_training(kind, make):
    callback, replays = kind(), []
    copying = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: replays.append(make(callback))
    )
    fit(one_weight(jit=BACKEND == "jax"), [1 / 8, 1 / 4], [callback, copying])
    assert trained(replays[1])[1] == {"loss": [5 / 128]}


class Fails(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


@each_optimizer
def test_interrupted_training_goes_on(kind, wrap):
    model, callback = one_weight(wrap, BACKEND == "jax"), kind()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [BAD, 1 / 8, 1 / 8, 1 / 8], [callback, Fails()])
    x, y = arrays([1 / 8, BAD])
    assert not model.evaluate(x, y, verbose=0) < 1e30
    assert trained(callback, model)[1] == {"loss": [5 / 128]}
    assert trained(callback, model)[1] == {"loss": [5 / 128]}


@each_optimizer
def test_steps_by_hand(kind, wrap):
    model, _ = trained(kind(), one_weight(wrap, BACKEND == "jax"))
    model.reset_metrics()  # As `train_on_batch` itself does from 3.14 on.
    assert model.train_on_batch(*arrays([1 / 8])) == 1 / 64
    model.reset_metrics()
    assert model.test_on_batch(*arrays([1 / 8])) == 1 / 64


def classifier(X, y):  # noqa: N803
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=JIT)
    return model


def test_scikit_learn(kind):
    model_selection = pytest.importorskip("sklearn.model_selection")
    arguments = {"callbacks": [kind()], "verbose": 0}
    model = keras.wrappers.SKLearnClassifier(classifier, fit_kwargs=arguments)
    x, y = np.linspace(-1, 1, 16)[:, None], np.arange(16) % 2
    # A clone loses `fit_kwargs`.
    scores = model_selection.cross_val_score(
        model, x, y, cv=2, params=arguments, error_score="raise"
    )
    assert len(scores) == 2
    again = copy.deepcopy(model.fit(x, y)).fit(x, y)
    assert again.predict(x).shape == y.shape
