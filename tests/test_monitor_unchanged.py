"""Whatever is done to a model between two fits, watching changes nothing."""

import copy
import functools

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, monitor, not_torch
from optimizer_models import numbers

import keras_mixprec as kmp

RNG = np.random.default_rng(4)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 2)).astype("float32")
LABELS = RNG.integers(0, 2, size=24)

WATCHING = {
    "monitor": lambda folder: [monitor(folder, update_freq=2)],
    "tuner": lambda folder: [kmp.PrecisionTuner(verbose=0)],
    "both": lambda folder: [monitor(folder), kmp.PrecisionTuner(verbose=0)],
}


class Run:
    """A model, and all that its fits have reported."""

    def __init__(self, watching, kind=keras.Sequential, jit=BACKEND == "jax"):
        self.watching, self.jit = watching, jit
        self.reported = []
        keras.utils.set_random_seed(5)
        keras.config.set_dtype_policy("mixed_float16")
        self.model = kind(
            [
                keras.Input((4,)),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )

    def compile(self, optimizer="sgd", loss="mse", **arguments):
        """Op by op on TensorFlow, which is exact, unless asked for XLA."""
        arguments = {"jit_compile": self.jit} | arguments
        self.model.compile(optimizer, loss, **arguments)

    def fit(self, y=Y, callbacks=(), watched=True, **arguments):
        watching = self.watching() if watched else []
        arguments = {"batch_size": 8, "shuffle": False} | arguments
        history = self.model.fit(
            X, y, verbose=0, callbacks=[*watching, *callbacks], **arguments
        ).history
        self.reported += sorted(history.items())

    def outcome(self):
        self.reported.append(("loss", self.model.evaluate(X, Y, verbose=0)))
        values = [np.asarray(v, "float64") for _, v in self.reported]
        return values + numbers(self.model.variables)


def new_loss(run):
    run.compile(loss="mae")
    run.fit()


def new_metrics(run):
    run.compile(metrics=["mae"], weighted_metrics=["mse"])
    run.fit()


def new_optimizer(run):
    run.compile(keras.optimizers.Adam(0.1))
    run.fit()


def new_clipnorm(run):
    run.compile(keras.optimizers.SGD(clipnorm=1e-3))
    run.fit()


def freeze_and_thaw(run):
    for trainable in False, True:
        run.model.layers[0].trainable = trainable
        run.compile()
        run.fit()


def run_eagerly(run):
    run.compile(run_eagerly=True, jit_compile=False)
    run.fit()


def steps_per_execution(run):
    run.compile(steps_per_execution=2)
    run.fit(epochs=2)


def new_weights(run):
    run.model.set_weights([w + 1 for w in run.model.get_weights()])
    run.fit(validation_data=(X[:8], Y[:8]))


def recompiled_function(run):
    run.model.layers[0].activation = keras.activations.tanh
    for kind in "train", "test":
        getattr(run.model, f"make_{kind}_function")(force=True)
    run.fit()


def other_callbacks(run):
    def halve(epoch, rate):
        return rate / 2

    rate = keras.callbacks.LearningRateScheduler(halve)
    model, epochs = run.model, []

    def rebuild(epoch, logs):
        epochs.append(epoch)
        if epoch == 1:
            model.layers[0].activation = keras.activations.tanh
            model.make_train_function(force=True)

    rebuilding = keras.callbacks.LambdaCallback(on_epoch_begin=rebuild)
    run.fit(callbacks=[rate, rebuilding], epochs=3)


def sample_weights(run):
    run.compile(weighted_metrics=["mse"])
    run.fit(sample_weight=np.arange(24) / 24)


def class_weights(run):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(loss=loss, metrics=["accuracy"])
    run.fit(y=LABELS, class_weight={0: 1.0, 1: 3.0})
    run.compile(metrics=["mse"])


def fits_without(run):
    run.fit(watched=False)
    run.compile(loss="mae")
    run.fit(watched=False)
    run.fit()


def evaluation(run):
    run.reported.append(("", run.model.predict(X, verbose=0)))
    run.reported.append(("", run.model.evaluate(X, Y, verbose=0)))
    run.reported.append(("", run.model.train_on_batch(X, Y)))
    run.fit()


class Stops(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def interrupted(run):
    with pytest.raises(KeyboardInterrupt):
        run.fit(callbacks=[Stops()])
    run.compile(loss="mae")
    run.fit(watched=False)
    run.fit()


def copies(run):
    model = run.model
    run.model = keras.models.clone_model(model)
    run.model.set_weights(model.get_weights())
    run.compile(loss="mae")
    run.fit()


def saved(run):
    run.model = copy.deepcopy(run.model)
    run.fit()
    run.fit(watched=False)


SEQUENCES = [
    new_loss,
    new_metrics,
    new_optimizer,
    new_clipnorm,
    freeze_and_thaw,
    run_eagerly,
    pytest.param(steps_per_execution, marks=not_torch),
    new_weights,
    recompiled_function,
    other_callbacks,
    sample_weights,
    class_weights,
    fits_without,
    evaluation,
    interrupted,
    copies,
    saved,
]


def assert_same(values, expected, jit=BACKEND == "jax"):
    for value, other in zip(values, expected, strict=True):
        if jit:  # XLA may fuse sums differently.
            np.testing.assert_allclose(value, other, rtol=2e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(value, other)


def outcome(sequence, kind, watching, *jit):
    run = Run(watching, kind, *jit)
    run.compile()
    run.fit()
    sequence(run)
    return run.outcome()


@functools.cache
def unwatched(sequence, kind=keras.Sequential, *jit):
    return outcome(sequence, kind, list, *jit)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_monitored_run_is_the_same(sequence, tmp_path):
    watched = outcome(
        sequence, keras.Sequential, lambda: WATCHING["monitor"](tmp_path)
    )
    assert_same(watched, unwatched(sequence))


@pytest.mark.parametrize(
    "name", [pytest.param("tuner", marks=pytest.mark.slow), "both"]
)
@pytest.mark.parametrize(
    "sequence",
    [
        new_loss,
        new_metrics,
        new_optimizer,
        new_clipnorm,
        freeze_and_thaw,
        run_eagerly,
        pytest.param(steps_per_execution, marks=not_torch),
        other_callbacks,
        fits_without,
    ],
)
def test_a_tuned_run_is_the_same(sequence, name, tmp_path):
    watched = outcome(
        sequence, keras.Sequential, lambda: WATCHING[name](tmp_path)
    )
    assert_same(watched, unwatched(sequence))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA of TensorFlow")
@pytest.mark.parametrize(
    "sequence",
    [pytest.param(new_loss, marks=pytest.mark.slow), new_clipnorm],
)
def test_a_run_that_xla_compiles_is_the_same(sequence, tmp_path):
    watched = outcome(
        sequence, keras.Sequential, lambda: WATCHING["both"](tmp_path), True
    )
    assert_same(watched, unwatched(sequence, keras.Sequential, True), jit=True)


class OwnStep(keras.Sequential):
    """A train step of the user's own, with the loss of the last `compile`."""

    def train_step(self, *args):
        return super().train_step(*args)


@pytest.mark.parametrize("sequence", [new_loss, interrupted])
def test_a_train_step_of_ones_own(sequence, tmp_path):
    watched = outcome(sequence, OwnStep, lambda: WATCHING["both"](tmp_path))
    assert_same(watched, unwatched(sequence, OwnStep))


def test_a_fit_leaves_nothing_behind(tmp_path):
    metric = keras.metrics.MeanSquaredError()
    run = Run(lambda: WATCHING["both"](tmp_path))
    run.compile(metrics=[metric])
    kept = [run.model, metric, *run.model.layers[1].variables]
    run.fit(watched=False)
    before = [set(vars(thing)) for thing in kept]
    names = [v.name for v in run.model.metrics_variables]
    run.fit()
    for thing, known in zip(kept, before, strict=True):
        left = set(vars(thing)) - known
        assert {n for n in left if not n.startswith("_")} == set()
    assert [v.name for v in run.model.metrics_variables] == names
