"""A watched run equals the same run without callbacks."""

import contextlib
import copy
import functools
import inspect
import pickle
import random
import threading
import types
import zipfile

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    BACKEND,
    BAD,
    DEFAULTS,
    JIT,
    JITS,
    OPTIMIZERS,
    arrays,
    dense,
    each_optimizer,
    every_backend,
    fit,
    good,
    monitor,
    not_jax,
    not_torch,
    one_backend,
    one_weight,
    only_tensorflow,
    only_torch,
    scalars,
    watched,
    with_bad,
)
from optimizer_models import numbers
from scale_use_models import gradients_of

import keras_mixprec as kmp
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.numerics import range_reading

pytestmark = one_backend

RNG = np.random.default_rng(4)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 2)).astype("float32")
LABELS = RNG.integers(0, 2, size=24)


def both(folder):
    return [monitor(folder), kmp.PrecisionTuner(verbose=0)]


class Run:
    """A model, and all that its fits have reported."""

    def __init__(self, watching):
        self.watching, self.reported = watching, []
        keras.utils.set_random_seed(5)
        keras.config.set_dtype_policy("mixed_float16")
        middle = keras.layers.Dense(3), keras.layers.BatchNormalization()
        last = keras.layers.Dense(2)
        self.model = keras.Sequential([keras.Input((4,)), *middle, last])

    def compile(self, optimizer="sgd", loss="mse", **arguments):
        """Op by op on TensorFlow, which is exact."""
        arguments = {"jit_compile": JIT} | arguments
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


def used_in_between(run):
    run.fit(watched=False)
    run.compile(loss="mae")
    run.fit(watched=False)
    run.reported.append(("", run.model.predict(X, verbose=0)))
    run.reported.append(("", run.model.evaluate(X, Y, verbose=0)))
    run.reported.append(("", run.model.train_on_batch(X, Y)))
    run.fit()


def outcome(sequence, watching):
    run = Run(watching)
    run.refit()
    sequence(run)
    return run.outcome()


@pytest.mark.parametrize(
    "sequence",
    [
        compiled_again,
        pytest.param(frozen_and_thawed, marks=every_backend),
        pytest.param(several_steps_at_once, marks=[not_torch, every_backend]),
        pytest.param(changed, marks=every_backend),
        used_in_between,
    ],
)
def test_a_watched_run_is_the_same(sequence, tmp_path):
    watched = outcome(sequence, lambda: both(tmp_path))
    for value, other in zip(watched, outcome(sequence, list), strict=True):
        if JIT:  # XLA may fuse sums differently.
            np.testing.assert_allclose(value, other, rtol=2e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(value, other)


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


@pytest.mark.long
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
        # The metrics' guard is in the program that XLA optimizes as a whole, so
        # sums may be fused, and rounded, differently.
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)


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


def by_hand(built, epochs, callbacks):
    """Three batches an epoch; returns what comes of them."""
    keras.utils.set_random_seed(2)
    keras.config.set_dtype_policy("mixed_float16")
    dense = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((1,))] * built + [dense])
    inner = keras.optimizers.SGD(0.1)
    optimizer = kmp.LossScaleOptimizer(inner, initial_scale=64.0)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=JIT)
    listeners = keras.callbacks.CallbackList(callbacks, model=model)
    listeners.on_train_begin()
    reported = []
    for index, value in enumerate(range(10, 16)):
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
    return reported + numbers(model.variables)


@pytest.mark.parametrize("epochs", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_a_loop_by_hand_is_the_same(built, epochs, tmp_path):
    watched, plain = (
        by_hand(built, epochs, callbacks) for callbacks in (both(tmp_path), [])
    )
    for value, expected in zip(watched, plain, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


# Models with unusual code.

GLOBAL = {"steps": 0}
STEPS = 0


class Own(keras.Model):
    """A train step of its own, with an optimizer that somebody else holds."""

    def __init__(self, keep):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        self.n, self.seen, self.kept = 0, [], {"steps": 0}
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(0.1))
        optimizer.build(self.net.trainable_variables)
        self.get = keep(self, optimizer)
        kmp.apply_policy(self, "mixed_float16", rules=[])
        self.compile("sgd", "mse", run_eagerly=True, jit_compile=False)

    def build(self, shape):
        pass

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        global STEPS
        STEPS += 1
        self.n += 1
        self.kept["steps"] += 1
        self.seen.append(self.n)
        GLOBAL["steps"] += 1
        factor = 1.0 + self.n + np.random.rand() + random.random()
        return {"loss": update(self, self.get(self), *data, factor)}


def update(model, optimizer, x, y, factor):
    weights = model.trainable_variables

    def scaled():
        error = ops.cast(model(x, training=True), "float32") - y
        return optimizer.scale_loss(ops.mean(ops.square(error)) * factor)

    loss, gradients = gradients_of(scaled, weights)
    optimizer.apply(gradients, weights)
    return loss


def in_nested_model(model, optimizer):
    model.net.compile(optimizer, "mse")
    return lambda model: model.net.optimizer


def in_closure(model, optimizer):
    return lambda model: optimizer


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def own_outcome(keep, *callbacks):
    """Returns a model's state after two fits and a diagnosis between them."""
    global STEPS
    STEPS = GLOBAL["steps"] = 0
    keras.utils.set_random_seed(1)
    model, history = Own(keep), []
    for _ in range(2):
        history += fit(model, (X, Y), callbacks)["loss"]
        if callbacks:
            kmp.diagnose(model, X, Y)
    counters = [STEPS, GLOBAL["steps"], model.n, model.kept["steps"]]
    draws = [np.random.rand(), random.random()]
    draws += numbers([keras.random.uniform((1,))])
    if BACKEND == "torch":
        import torch

        draws += numbers([torch.rand(1)])
    kept = numbers([*model.variables, *model.get(model).variables])
    return [history, counters, model.seen, *draws, *kept]


# On JAX a step is a function of the state that Keras gives it.
@every_backend
@not_jax
@pytest.mark.parametrize("keep", [in_nested_model, in_closure])
def test_an_optimizer_may_be_anywhere(keep, tmp_path):
    assert_same(own_outcome(keep, *both(tmp_path)), own_outcome(keep))


def model_with(*middle, **arguments):
    middle = middle or (layers.Dense(8), layers.Dropout(0.3))
    adam = {"optimizer": keras.optimizers.Adam(0.01), "rules": []}
    return dense(*middle, outputs=2, **adam, **arguments)


@only_torch
def test_a_step_set_on_the_instance(tmp_path):
    import torch

    def step(self, data):
        with torch.no_grad():
            for weight in self.trainable_variables:
                weight.value.mul_(0.999)
        return {"loss": update(self, self.optimizer, *data, 1.0)}

    def run(*callbacks):
        keras.utils.set_random_seed(1)
        model = model_with()
        model.optimizer.build(model.trainable_variables)
        model.train_step = types.MethodType(step, model)
        history = fit(model, (X, Y), callbacks)
        return [history["loss"], *numbers(model.variables)]

    assert_same(run(*both(tmp_path)), run())


@pytest.mark.long
@every_backend
def test_masks_and_sample_weights(tmp_path):
    tokens = np.arange(96).reshape(8, 12) % 20
    tokens[:, 8:] = 0

    def run(*callbacks):
        keras.utils.set_random_seed(0)
        embedding = layers.Embedding(20, 4, mask_zero=True)
        model = keras.Sequential([embedding, layers.Dense(20)])
        kmp.apply_policy(model, "mixed_float16")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = kmp.LossScaleOptimizer("adam")
        model.compile(optimizer, loss, jit_compile=JIT)
        weights = {"sample_weight": (tokens != 0).astype("float32")}
        history = fit(model, (tokens, tokens), callbacks, **weights)
        return [history["loss"], *model.get_weights()]

    watched = run(*both(tmp_path))
    assert_same(watched, run())


@every_backend
def test_draws_of_another_thread_are_its_own():
    model = model_with(layers.GaussianNoise(0.1), layers.Dropout(0.5))
    kmp.diagnose(model, X, Y)
    ones = ops.ones((64,))
    alone = ops.convert_to_numpy(keras.random.dropout(ones, 0.5, seed=7))
    numpy = np.random.RandomState(3)
    np.random.seed(3)
    found, over = [], threading.Event()

    def draw():
        while not over.is_set():
            mask = keras.random.dropout(ones, 0.5, seed=7)
            same = np.array_equal(ops.convert_to_numpy(mask), alone)
            found.append((same, np.random.rand() == numpy.rand()))

    thread = threading.Thread(target=draw)
    thread.start()
    kmp.diagnose(model, X, Y)
    over.set()
    thread.join()
    assert set(found) == {(True, True)}


@only_torch
def test_an_optimizer_of_torch():
    import torch

    class Torch(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.own.zero_grad()
            loss = ops.mean(ops.square(self(x) - y))
            loss.backward()
            self.own.step()
            self.schedule.step()
            for mean, weight in zip(self.teacher, self.weights, strict=True):
                mean.mul_(0.9).add_(weight.value.detach(), alpha=0.1)
            return {"loss": loss.detach()}

    model = Torch([keras.Input((4,)), layers.Dense(2)])
    own = torch.optim.Adam(model.parameters(), 0.1)
    model.own = own
    model.schedule = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    model.teacher = [w.value.detach().clone() for w in model.weights]
    model.compile("sgd")

    def kept():
        moments = [v for s in own.state.values() for v in s.values()]
        kept = [*model.teacher, *moments, *map(ops.copy, model.weights)]
        return numbers(kept) + [g["lr"] for g in own.param_groups]

    for _ in range(2):  # Before the first step, and after one.
        before = kept()
        kmp.diagnose(model, X, Y)
        assert_same(kept(), before)
        model.fit(X, Y, verbose=0)


@every_backend
@only_tensorflow
@pytest.mark.parametrize("traced", [False, True])
def test_variables_of_tensorflows_own(traced):
    import tensorflow as tf

    mean = tf.Variable(tf.zeros((4, 2)))

    def follow(weight):
        mean.assign(0.9 * mean + 0.1 * weight)

    follow = tf.function(follow) if traced else follow

    class Followed(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            follow(self.trainable_variables[0].value)
            return logs

    model = Followed([keras.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    before = mean.numpy()
    kmp.diagnose(model, X, Y)
    np.testing.assert_array_equal(mean.numpy(), before)


@pytest.mark.long
@every_backend
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_train_begin", ValueError),
        ("on_train_batch_begin", KeyboardInterrupt),
        ("on_test_batch_begin", ValueError),
        ("on_train_end", KeyboardInterrupt),
    ],
)
def test_an_interrupted_fit_leaves_the_model_as_it_was(hook, error, tmp_path):
    def stop(self, *args, **kwargs):
        raise error

    def interrupted(*callbacks):
        keras.utils.set_random_seed(2)
        model = model_with(metrics=["mae"], jit=BACKEND == "jax")
        stops = type("Stops", (keras.callbacks.Callback,), {hook: stop})()
        with contextlib.suppress(error):
            fit(model, (X, Y), [*callbacks, stops], validation_data=(X, Y))
        return model

    model = interrupted(monitor(tmp_path, probe_every=1))
    other = interrupted()
    own, plain = (
        {n for n in vars(each) if not n.startswith("_keras_mixprec")}
        for each in (model, other)
    )
    assert own == plain
    assert "_keras_mixprec_session" not in vars(model)
    assert type(model.train_function) is type(other.train_function)
    for metric, plain in zip(model.metrics, other.metrics, strict=True):
        assert vars(metric).keys() == vars(plain).keys()
        assert len(metric.variables) == len(plain.variables)
    results = [m.evaluate(X, Y, verbose=0) for m in (model, other)]
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.usefixtures("training_goes_on")
def test_a_reading_that_fails_trains_no_batch_twice(monkeypatch, tmp_path):
    def run(*callbacks):
        keras.utils.set_random_seed(0)
        model = model_with()
        fit(model, (X, Y), callbacks, batch_size=2)
        return numbers(model.variables)

    def fails(*args):
        raise MemoryError

    expected = run()
    monkeypatch.setattr(range_reading, "run_held", fails)
    with pytest.warns(UserWarning, match="measure"):
        found = run(monitor(tmp_path, probe_every=1))
    assert_same(found, expected)


# Several may wait for the next call of a train function.


def waiting(model):
    """Returns the functions that a model's next step will call, in order."""
    model.make_train_function()
    function, called = TrainFunction.of(model), []
    works = [lambda _, name=name: called.append(name) for name in "abc"]
    for work in works:
        function.before_next(work)
    return function, called, works


@pytest.mark.parametrize("is_canceled", [False, True])
def test_calls_that_wait_go_one_after_the_other(is_canceled):
    model = one_weight()
    model.make_train_function()
    own = model.train_function
    function, called, waits = waiting(model)
    assert all(map(function.waits, waits))
    if is_canceled:
        function.cancel()
        assert model.train_function is own
    fit(model, [1.0, 1.0], [])
    assert called == [] if is_canceled else ["a", "b", "c"]
    assert not any(map(function.waits, waits))
    assert model.train_function is own


def test_a_recompiled_train_function_ends_the_wait():
    model = one_weight()
    function, called, waits = waiting(model)
    model.make_train_function(force=True)
    own = model.train_function
    assert not any(map(function.waits, waits))
    function.release()
    fit(model, [1.0], [])
    assert (called, model.train_function) == ([], own)


# Watched models and callbacks are saved, copied and used again as others.

VALUES = with_bad(good(4), 1)


def watched_model(wrap, tmp_path):
    root = keras.metrics.RootMeanSquaredError(name="root")
    model = one_weight(wrap, JIT, metrics=["mse", root])
    return watched(tmp_path / "logs", VALUES, model).model


def saved(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.models.load_model(tmp_path / "model.keras")


@pytest.mark.long
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


# Properties of every callback of the package.

CALLBACKS = [
    kind
    for kind in (getattr(kmp, name) for name in kmp.__all__)
    if inspect.isclass(kind) and issubclass(kind, keras.callbacks.Callback)
]


def each_kind(test):
    """For each callback, in a folder of its own."""
    each = pytest.mark.parametrize("kind", CALLBACKS)
    return pytest.mark.usefixtures("own_folder")(each(test))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trains(callback, model=None):
    """Checks that a model trains as without the callback."""
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
    results = "verdicts", "summary", "plan", "history", "log_dir"
    kept = [name for name in results if hasattr(callback, name)]
    assert len(kept) >= 2
    for name in kept:
        assert repr(getattr(replay, name)) == repr(getattr(callback, name))
    assert replay.model is None
    assert trains(replay)
    assert trains(copy.copy(callback))
    assert trains(callback, make(model))


@every_backend
@only_tensorflow
def test_a_train_step_that_the_user_compiles(tmp_path):
    """If a dry step traced it, training would run that trace."""
    import tensorflow as tf

    class Own(keras.Sequential):
        @tf.function
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                found = tf.cast(self(x, training=True), "float32")
                loss = tf.reduce_mean(tf.square(found - y))
                scaled = self.optimizer.scale_loss(loss)
            weights = self.trainable_variables
            gradients = tape.gradient(scaled, [v.value for v in weights])
            self.optimizer.apply(gradients, weights)
            return {"own_loss": loss}

    def trained(callbacks):
        dense = layers.Dense(1, "tanh", dtype="mixed_float16")
        model = Own([keras.Input((4,)), dense])
        model.set_weights([np.ones((4, 1)), np.zeros(1)])
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(kmp.LossScaleOptimizer(optimizer), jit_compile=False)
        x = np.ones((16, 4), "float32")
        model.fit(x, -1e3 * x[:, :1], 4, verbose=0, callbacks=callbacks)
        return [*model.get_weights(), model.optimizer.skipped_steps]

    watched = trained([monitor(tmp_path)])
    for one, other in zip(trained([]), watched, strict=True):
        np.testing.assert_array_equal(one, other)
