"""Training loops written by hand, with a `CallbackList`."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, arrays, monitor, scalars
from optimizer_models import numbers

import keras_mixprec as kmp

WATCHING = {
    "none": lambda folder: [],
    "monitor": lambda folder: [
        monitor(folder, update_freq=1, probe_every=2, keep_failing_batches=1)
    ],
    "tuner": lambda folder: [kmp.PrecisionTuner(verbose=0, cooldown=0)],
    "both": lambda folder: [
        monitor(folder, update_freq=1),
        kmp.PrecisionTuner(verbose=0, cooldown=0),
    ],
}
each_watching = pytest.mark.parametrize("name", list(WATCHING)[1:])
each_epochs = pytest.mark.parametrize(
    "epochs", [True, False], ids=["epochs", "batches"]
)


def network(rescaled=1.0, built=True):
    """Computes the same whatever it is rescaled by in between."""
    keras.utils.set_random_seed(2)
    keras.config.set_dtype_policy("mixed_float16")
    layers = [
        keras.layers.Rescaling(rescaled, name="up"),
        keras.layers.Rescaling(1 / rescaled, name="down"),
        keras.layers.Dense(1, name="dense"),
    ]
    model = keras.Sequential([keras.Input((1,))] * built + layers)
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0),
        "mse",
        metrics=["mae"],
        jit_compile=BACKEND == "jax",
    )
    return model


def train(model, callbacks, epochs=True, count=6):
    """Three batches an epoch; returns what each of them reported."""
    listeners = keras.callbacks.CallbackList(callbacks, model=model)
    listeners.on_train_begin()
    reported = []
    for index, value in enumerate(range(10, 10 + count)):
        if epochs and index % 3 == 0:
            listeners.on_epoch_begin(index // 3)
        batch = index % 3 if epochs else index
        listeners.on_train_batch_begin(batch)
        logs = model.train_on_batch(*arrays([value / 8]), return_dict=True)
        listeners.on_train_batch_end(batch, logs)
        reported += sorted(logs.items())
        if epochs and index % 3 == 2:
            listeners.on_epoch_end(index // 3, logs)
    listeners.on_train_end()
    return reported


@each_epochs
@each_watching
@pytest.mark.parametrize("built", [True, False], ids=["built", "unbuilt"])
def test_results_are_those_of_an_unwatched_loop(name, epochs, built, tmp_path):
    outcomes = []
    for watching in "none", name:
        model = network(built=built)
        reported = train(model, WATCHING[watching](tmp_path), epochs)
        outcomes.append((reported, numbers(model.variables)))
    (expected, weights), (reported, watched) = outcomes
    assert [n for n, _ in reported] == [n for n, _ in expected]
    for value, other in zip(watched, weights, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)
    for (_, value), (_, other) in zip(reported, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)


@each_epochs
@pytest.mark.parametrize("name", ["tuner", "both"])
def test_a_layer_that_overflows_is_demoted(name, epochs, tmp_path):
    model, callbacks = network(6e4), WATCHING[name](tmp_path)
    train(model, callbacks, epochs)
    assert callbacks[-1].plan["up"] == "float32"
    assert callbacks[-1].history[0]["step"] == 0
    assert model.optimizer.skipped_steps == 0


@each_epochs
def test_batches_are_numbered_on(epochs, tmp_path):
    train(network(), [monitor(tmp_path, update_freq=1)], epochs)
    assert sorted(scalars(tmp_path, "loss_scale")) == list(range(7))


def test_a_failing_batch_is_kept(tmp_path):
    callback = WATCHING["monitor"](tmp_path)[0]
    model = network(6e4)
    train(model, [callback])
    # TensorFlow may fold the two factors op by op.
    skipped = [found.step for found in model.optimizer.nonfinite_steps()]
    assert [b.step for b in callback.failing_batches] == skipped[:1]


def test_one_callback_without_a_list():
    model, callback = network(), kmp.PrecisionTuner(verbose=0)
    callback.set_model(model)
    callback.on_train_begin()
    for batch in range(3):
        callback.on_train_batch_begin(0)
        model.train_on_batch(*arrays([1.0 + batch]))
    callback.on_train_end()
    assert dict(callback.plan)["dense"] == "mixed_float16"
