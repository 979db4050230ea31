"""Whatever a model's own code does, a run that is watched is the same run."""

import contextlib
import random

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    BACKEND,
    dense,
    every_backend,
    fit,
    monitor,
    not_jax,
    one_backend,
    only_tensorflow,
    only_torch,
)
from optimizer_models import numbers

import keras_mixprec as kmp

pytestmark = one_backend

X = np.random.default_rng(0).random((24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
GLOBAL = {"steps": 0}
STEPS = 0


class Own(keras.Model):
    """A train step of its own, with an optimizer that somebody else holds."""

    def __init__(self, keep):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
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


def update(model, optimizer, x, y, factor=1.0):
    weights = model.trainable_variables

    def loss_of():
        error = ops.cast(model(x, training=True), "float32") - y
        return ops.mean(ops.square(error)) * factor

    if BACKEND == "torch":
        import torch

        model.zero_grad()
        loss = loss_of()
        optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            optimizer.apply([w.value.grad for w in weights], weights)
        return loss.detach()
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of()
        scaled = optimizer.scale_loss(loss)
    optimizer.apply(tape.gradient(scaled, weights), weights)
    return loss


def in_nested_model(model, optimizer):
    model.net.compile(optimizer, "mse")
    return lambda model: model.net.optimizer


def in_closure(model, optimizer):
    return lambda model: optimizer


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def outcome(make, *callbacks):
    """What a model has come to after two fits and a diagnosis between."""
    global STEPS
    STEPS = GLOBAL["steps"] = 0
    keras.utils.set_random_seed(1)
    model, history = make(), []
    for _ in range(2):
        history += fit(model, (X, Y), callbacks)["loss"]
        if callbacks:
            kmp.diagnose(model, X, Y)
    counters = [STEPS, GLOBAL["steps"]]
    if hasattr(model, "n"):
        counters += [model.n, model.kept["steps"], *model.seen]
    held = model.get(model) if hasattr(model, "get") else model.optimizer
    draws = [np.random.rand(), random.random()]
    draws += numbers([keras.random.uniform((1,))])
    if BACKEND == "torch":
        import torch

        draws += numbers([torch.rand(1)])
    kept = numbers([*model.variables, *held.variables])
    return [history, counters, *draws, *kept]


def assert_twins(make, folder):
    callbacks = monitor(folder), kmp.PrecisionTuner(verbose=0)
    assert_same(outcome(make, *callbacks), outcome(make))


# On JAX a step is a function of the state that Keras gives it.
@not_jax
@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(in_nested_model, marks=every_backend),
        pytest.param(in_closure, marks=every_backend),
    ],
)
def test_an_optimizer_may_be_anywhere(keep, tmp_path):
    assert_twins(lambda: Own(keep), tmp_path)


def model_with(*middle, **arguments):
    middle = middle or (layers.Dense(8), layers.Dropout(0.3))
    adam = {"optimizer": keras.optimizers.Adam(0.01), "rules": []}
    return dense(*middle, **adam, **arguments)


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

    model = Torch([keras.Input((4,)), layers.Dense(1)])
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

    mean = tf.Variable(tf.zeros((4, 1)))

    def follow(weight):
        mean.assign(0.9 * mean + 0.1 * weight)

    follow = tf.function(follow) if traced else follow

    class Followed(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            follow(self.trainable_variables[0].value)
            return logs

    model = Followed([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    before = mean.numpy()
    kmp.diagnose(model, X, Y)
    np.testing.assert_array_equal(mean.numpy(), before)


HOOKS = [
    pytest.param("on_train_begin", ValueError, marks=every_backend),
    pytest.param(
        "on_train_batch_begin", KeyboardInterrupt, marks=every_backend
    ),
    pytest.param("on_test_batch_begin", ValueError, marks=every_backend),
    ("on_train_end", KeyboardInterrupt),
]


@pytest.mark.parametrize(("hook", "error"), HOOKS)
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


def test_a_policy_that_cannot_be_set_leaves_none_set():
    class Stubborn(layers.Dense):
        @property
        def dtype_policy(self):
            return self._dtype_policy

        @dtype_policy.setter
        def dtype_policy(self, policy):
            if getattr(policy, "name", policy) == "float32":
                raise RuntimeError
            self._dtype_policy = policy

    keras.config.set_dtype_policy("mixed_float16")
    own = layers.Dense(2), Stubborn(1)
    model = keras.Sequential([keras.Input((4,)), *own])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    with contextlib.suppress(RuntimeError):
        kmp.diagnose(model, X, Y)
    policies = {layer.dtype_policy.name for layer in model.layers}
    assert policies == {"mixed_float16"}


@only_torch
@pytest.mark.usefixtures("training_goes_on")
def test_a_probe_that_fails_trains_no_batch_twice(monkeypatch, tmp_path):
    from keras_mixprec.numerics.collector import Collector

    def run(*callbacks):
        keras.utils.set_random_seed(0)
        model = model_with()
        fit(model, (X, Y), callbacks, batch_size=2)
        return numbers(model.variables)

    def fails(self, result):
        raise MemoryError

    expected = run()
    monkeypatch.setattr(Collector, "carry", fails)
    with pytest.warns(UserWarning, match="probe"):
        found = run(monitor(tmp_path, probe_every=1))
    assert_same(found, expected)
