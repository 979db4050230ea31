"""A run that is watched is the same run, whatever is done to its model."""

import copy
import functools

import keras
import numpy as np
import pytest
from monitor_models import (
    DEFAULTS,
    JIT,
    JITS,
    OPTIMIZERS,
    OwnStep,
    arrays,
    each_jit,
    every_backend,
    fit,
    monitor,
    not_torch,
    one_backend,
    only_tensorflow,
    scalars,
)
from optimizer_models import numbers

import keras_mixprec as kmp
from keras_mixprec.guards.train_function import DeferredCall

pytestmark = one_backend

RNG = np.random.default_rng(4)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 2)).astype("float32")
LABELS = RNG.integers(0, 2, size=24)

WATCHING = {
    "none": lambda folder: [],
    "monitor": lambda folder: [monitor(folder, update_freq=2)],
    "tuner": lambda folder: [kmp.PrecisionTuner(verbose=0)],
    "both": lambda folder: [monitor(folder), kmp.PrecisionTuner(verbose=0)],
}


class Run:
    """A model, and all that its fits have reported."""

    def __init__(self, watching, kind=keras.Sequential, jit=JIT):
        self.watching, self.jit = watching, jit
        self.reported = []
        keras.utils.set_random_seed(5)
        keras.config.set_dtype_policy("mixed_float16")
        middle = keras.layers.Dense(3), keras.layers.BatchNormalization()
        last = keras.layers.Dense(2)
        self.model = kind([keras.Input((4,)), *middle, last])

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

    def refit(self, *compiled, **arguments):
        self.compile(*compiled, **arguments)
        self.fit()

    def outcome(self):
        self.reported.append(("loss", self.model.evaluate(X, Y, verbose=0)))
        values = [np.asarray(v, "float64") for _, v in self.reported]
        return values + numbers(self.model.variables)


def compiled_again(run):
    run.refit(loss="mae")
    run.refit(metrics=["mae"], weighted_metrics=["mse"])
    run.refit(keras.optimizers.Adam(0.1))
    run.refit(keras.optimizers.SGD(clipnorm=1e-3))
    run.refit(run_eagerly=True, jit_compile=False)


def clipped(run):
    run.refit(keras.optimizers.SGD(clipnorm=1e-3))


def frozen_and_thawed(run):
    for trainable in False, True:
        run.model.layers[0].trainable = trainable
        run.refit()


def several_steps_at_once(run):
    run.compile(steps_per_execution=2)
    run.fit(epochs=2)


def changed(run):
    run.model.set_weights([w + 1 for w in run.model.get_weights()])
    run.fit(validation_data=(X[:8], Y[:8]))
    run.model.layers[0].activation = keras.activations.tanh
    for kind in "train", "test":
        getattr(run.model, f"make_{kind}_function")(force=True)
    run.fit()


def changed_by_callbacks(run):
    def halve(epoch, rate):
        return rate / 2

    def rebuild(epoch, logs):
        if epoch == 1:
            run.model.layers[0].activation = keras.activations.tanh
            run.model.make_train_function(force=True)

    rate = keras.callbacks.LearningRateScheduler(halve)
    rebuilding = keras.callbacks.LambdaCallback(on_epoch_begin=rebuild)
    run.fit(callbacks=[rate, rebuilding], epochs=3)


def weighted(run):
    run.compile(weighted_metrics=["mse"])
    run.fit(sample_weight=np.arange(24) / 24)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(loss=loss, metrics=["accuracy"])
    run.fit(y=LABELS, class_weight={0: 1.0, 1: 3.0})
    run.compile(metrics=["mse"])


def used_in_between(run):
    run.fit(watched=False)
    run.compile(loss="mae")
    run.fit(watched=False)
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


def copied(run):
    run.model = copy.deepcopy(run.model)
    run.fit()
    run.fit(watched=False)
    model = run.model
    run.model = keras.models.clone_model(model)
    run.model.set_weights(model.get_weights())
    run.refit(loss="mae")


SEQUENCES = [
    compiled_again,
    pytest.param(frozen_and_thawed, marks=every_backend),
    pytest.param(several_steps_at_once, marks=[not_torch, every_backend]),
    pytest.param(changed, marks=every_backend),
    changed_by_callbacks,
    weighted,
    used_in_between,
    pytest.param(interrupted, marks=every_backend),
    copied,
]


def assert_same(values, expected, jit):
    for value, other in zip(values, expected, strict=True):
        if jit:  # XLA may fuse sums differently.
            np.testing.assert_allclose(value, other, rtol=2e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(value, other)


def outcome(sequence, watching, kind, jit):
    run = Run(watching, kind, jit)
    run.refit()
    sequence(run)
    return run.outcome()


@functools.cache
def unwatched(sequence, kind=keras.Sequential, jit=JIT):
    return outcome(sequence, list, kind, jit)


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize(
    "name",
    [
        "both",
        pytest.param("monitor", marks=pytest.mark.slow),
        pytest.param("tuner", marks=pytest.mark.slow),
    ],
)
def test_a_watched_run_is_the_same(sequence, name, tmp_path):
    watching = functools.partial(WATCHING[name], tmp_path)
    watched = outcome(sequence, watching, keras.Sequential, JIT)
    assert_same(watched, unwatched(sequence), JIT)


@every_backend
@pytest.mark.parametrize(
    ("sequence", "kind", "jit"),
    [
        (interrupted, OwnStep, JIT),
        pytest.param(clipped, keras.Sequential, True, marks=only_tensorflow),
    ],
)
def test_a_step_of_ones_own_or_under_xla_is_the_same(
    sequence, kind, jit, tmp_path
):
    watching = functools.partial(WATCHING["both"], tmp_path)
    watched = outcome(sequence, watching, kind, jit)
    assert_same(watched, unwatched(sequence, kind, jit), jit)


@every_backend
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


# With dropout and an optimizer's state, whoever wrapped the optimizer.


def network(wrap, jit=JIT):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("mixed_float16" if wrap else "float32")
    middle = [
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
    ]
    last = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), *middle, last])
    model.compile(
        (wrap or OPTIMIZERS["auto"])(keras.optimizers.Adam(0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["sparse_categorical_crossentropy"],
        jit_compile=jit,
    )
    return model


def trained(wrap, jit, *callbacks):
    model, history = network(wrap, jit), []
    for _ in range(2):
        own = {"batch_size": 8, "validation_data": (X[:8], LABELS[:8])}
        found = fit(model, (X, LABELS), callbacks, epochs=2, **own)
        history += [found[name] for name in sorted(found)]
    return history + numbers(model.variables)


# The metrics' guard is in the program that XLA optimizes as a whole, so sums
# may be fused, and rounded, differently.
CLOSE = {"rtol": 1e-3, "atol": 1e-5}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ours", {"update_freq": 2}, marks=every_backend),
        ("ours", DEFAULTS),  # Ranges are measured.
        ("keras", {"update_freq": 2}),
        ("auto", {"update_freq": 2}),
        (None, {"update_freq": 2}),
    ],
)
def test_losses_metrics_and_weights_are_the_same(name, options, jit, tmp_path):
    wrap = OPTIMIZERS.get(name)
    watched = trained(wrap, jit, monitor(tmp_path, **options))
    if options is DEFAULTS:
        # Two calls of `fit`, of two epochs of three steps each.
        steps = sorted(scalars(tmp_path, "mixprec_ranges/weight_headroom_bits"))
        assert (steps[0], steps[-1]) == (1, 12)
    for value, expected in zip(watched, trained(wrap, jit), strict=True):
        if not jit:
            np.testing.assert_array_equal(value, expected)
        np.testing.assert_allclose(value, expected, **CLOSE)


@each_jit
def test_a_loss_that_keras_takes_from_logits_is_the_same(jit, tmp_path):
    def losses(*callbacks):
        keras.utils.set_random_seed(3)
        keras.config.set_dtype_policy("mixed_float16")
        head = keras.layers.Dense(3, activation="softmax", dtype="float32")
        model = keras.Sequential([keras.Input((4,)), head])
        optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=8.0)
        loss = "sparse_categorical_crossentropy"
        model.compile(optimizer, loss, jit_compile=jit)
        # The probabilities underflow, where softmax has no gradient.
        return fit(model, (100 * X, LABELS), callbacks)["loss"]

    watched = losses(monitor(tmp_path, update_freq=1, probe_every=1))
    np.testing.assert_allclose(
        watched, losses(), **CLOSE if jit else {"rtol": 0}
    )


@every_backend
def test_random_state_is_left_alone(tmp_path):
    draws = []
    for callbacks in [monitor(tmp_path)], []:
        model = network(OPTIMIZERS["ours"])
        fit(model, (X, LABELS), callbacks)
        draws.append(keras.random.uniform((3,)))
    np.testing.assert_array_equal(*numbers(draws))


def test_an_adopted_optimizer_goes_on_where_it_was(tmp_path):
    kind = keras.optimizers.LossScaleOptimizer
    model = network(functools.partial(kind, initial_scale=8.0))
    fit(model, (X, LABELS), [])
    before = model.optimizer
    fit(model, (X, LABELS), [monitor(tmp_path)])
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is before.inner_optimizer
    assert int(model.optimizer.iterations) == 12
    assert int(keras.ops.convert_to_numpy(before.step_counter)) == 12


# Training loops written by hand, with a `CallbackList`.


def rescaled(by=1.0, built=True):
    """Computes the same whatever it is rescaled by in between."""
    keras.utils.set_random_seed(2)
    keras.config.set_dtype_policy("mixed_float16")
    layers = [
        keras.layers.Rescaling(by, name="up"),
        keras.layers.Rescaling(1 / by, name="down"),
        keras.layers.Dense(1, name="dense"),
    ]
    model = keras.Sequential([keras.Input((1,))] * built + layers)
    inner = keras.optimizers.SGD(0.1)
    optimizer = kmp.LossScaleOptimizer(inner, initial_scale=64.0)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=JIT)
    return model


def train_by_hand(model, callbacks, epochs=True, count=6):
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
        reported += [logs[name] for name in sorted(logs)]
        if epochs and index % 3 == 2:
            listeners.on_epoch_end(index // 3, logs)
    listeners.on_train_end()
    return reported


each_epochs = pytest.mark.parametrize(
    "epochs", [True, False], ids=["epochs", "batches"]
)


@each_epochs
@pytest.mark.parametrize(
    ("name", "built"),
    [("monitor", False), ("tuner", True), ("both", True), ("both", False)],
)
def test_a_loop_by_hand_is_the_same(name, epochs, built, tmp_path):
    outcomes = []
    for watching in "none", name:
        model = rescaled(built=built)
        callbacks = WATCHING[watching](tmp_path)
        reported = train_by_hand(model, callbacks, epochs)
        outcomes.append(reported + numbers(model.variables))
    for value, expected in zip(*outcomes, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@each_epochs
def test_a_layer_that_overflows_by_hand_is_demoted(epochs, tmp_path):
    tuner = kmp.PrecisionTuner(verbose=0, cooldown=0)
    model = rescaled(6e4)
    train_by_hand(model, [monitor(tmp_path, update_freq=1), tuner], epochs)
    assert tuner.plan["up"] == "float32"
    assert tuner.history[0]["step"] == 0
    assert model.optimizer.skipped_steps == 0
    # Batches are numbered on.
    assert sorted(scalars(tmp_path, "loss_scale")) == list(range(7))


def test_a_failing_batch_by_hand_is_kept(tmp_path):
    watcher, model = monitor(tmp_path, keep_failing_batches=1), rescaled(6e4)
    train_by_hand(model, [watcher])
    # TensorFlow may fold the two factors op by op.
    skipped = [found.step for found in model.optimizer.nonfinite_steps()]
    assert [b.step for b in watcher.failing_batches] == skipped[:1]


# Several may wait for the next call of a train function.


class Model:
    def __init__(self):
        self.train_function = self.own = lambda data: [data]


def waiting(model, call=None):
    """A `DeferredCall` that tells of itself, once."""
    call = call or DeferredCall()

    def train(data):
        call.disarm()
        return [call, *model.train_function(data)]

    call.arm(model, train)
    return call


@pytest.mark.parametrize("change", ["none", "first waits no more", "again"])
def test_calls_that_wait_go_one_after_the_other(change):
    model = Model()
    first, last = waiting(model), waiting(model)
    assert [first.armed, last.armed] == [True, True]
    expected = [last, first, 1]
    if change == "first waits no more":
        first.disarm()
        expected = [last, 1]
    if change == "again":  # Which takes the place of the wait.
        waiting(model, first)
        expected = [first, last, 1]
    assert model.train_function(1) == expected
    assert [first.armed, last.armed] == [False, False]
    assert model.train_function is model.own


def test_a_recompiled_train_function_ends_the_wait():
    model = Model()
    call = waiting(model)
    model.train_function = model.own
    assert not call.armed
    call.disarm()
    assert model.train_function is model.own
