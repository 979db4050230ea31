"""An update that depends on the loss scale is reported, and no other one."""

import functools

import keras
import numpy as np
import pytest
from diagnosis_models import Own
from keras import ops
from scale_use_models import (
    BACKEND,
    Step,
    X,
    Y,
    clipped,
    compiled,
    gradients_of,
    network,
    norm,
)
from zoo.own_step import with_input_gradient

from keras_mixprec import (
    LossScaleOptimizer,
    MixPrecMonitor,
    PrecisionTuner,
    diagnose,
)

SGD = keras.optimizers.SGD


def step(*layers, **parts):
    """Returns what makes a model whose step has some parts of its own."""
    return lambda: compiled(network(*layers), Step(**parts))


def change(function, unscale=False):
    """A step that changes gradients, scaled or not, before it applies them."""

    def update(optimizer, gradients, variables):
        if unscale:
            gradients = optimizer.unscale(gradients)
        optimizer.apply(function(gradients), variables)

    return step(update=update)


def change_each(function, **arguments):
    return change(lambda gradients: [*map(function, gradients)], **arguments)


def add(penalty):
    """A step that adds to the scaled loss what is not scaled."""

    def scaled(model, loss):
        return model.optimizer.scale_loss(loss) + penalty(model)

    return step(scaled=scaled)


def by_hand(change):
    """A step that changes what a loss scale is used for."""

    def update(optimizer, gradients, variables):
        change(optimizer, gradients, optimizer.loss_scale, variables)

    return step(update=update)


def own_gradient(function, gradient):
    """A function with a gradient of its own, `gradient(upstream, x)`."""

    @ops.custom_gradient
    def own(x):
        def grad(*args, upstream=None):
            (given,) = args or (upstream,)
            return gradient(given, x)

        return function(x), grad

    return own


def adds_gradient(x):
    own = own_gradient(lambda x: x * 1.0, lambda upstream, x: upstream + 0.1)
    return ops.cast(own(ops.cast(x, "float32")), x.dtype)


def with_copy(function):
    """A function of gradients that rounds a copy of them to float16."""

    def both(gradients):
        copies = [ops.cast(g, "float16") for g in gradients]
        gradients[0] = gradients[0] + 0 * ops.cast(copies[0] > 0, "float32")
        return function(gradients)

    return both


SQUARES = own_gradient(
    lambda x: ops.mean(ops.square(x)), lambda upstream, x: 2 * x / 8
)
SEED = keras.random.SeedGenerator(3)


def noisy(gradient):
    shape = tuple(gradient.shape)
    return gradient + keras.random.normal(shape, seed=SEED)


def with_native_noise(model, x, y):
    """The loss of data with noise that Keras does not draw."""
    noise = np.random.normal(size=x.shape)
    if BACKEND == "torch":
        import torch

        noise = torch.randn(x.shape)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        noise = tf.random.normal(x.shape)
    return Step().loss(model, x + ops.cast(noise, x.dtype), y)


def apply_unscaled_twice(optimizer, gradients, scale, variables):
    optimizer.apply([g / scale for g in gradients], variables)


def apply_inner(optimizer, gradients, scale, variables):
    gradients = [g / scale for g in gradients]
    optimizer.inner_optimizer.apply(gradients, variables)


def apply_inner_if_finite(optimizer, gradients, scale, variables):
    gradients = [ops.where(ops.isfinite(g), g, 0.0) for g in gradients]
    apply_inner(optimizer, gradients, scale, variables)


def clipping(unscale=False):
    class Clipping(LossScaleOptimizer):
        def apply(self, grads, trainable_variables=None):
            grads = self.unscale(grads) if unscale else grads
            super().apply(clipped(grads), trainable_variables)

    return compiled(optimizer=Clipping(SGD(0.01)))


def penalty_of_weights(model):
    return 0.1 * sum(ops.sum(ops.square(v)) for v in model.trainable_weights)


def slope(model, x):
    x = ops.convert_to_tensor(x)
    _, found = with_input_gradient(lambda x: model(x, training=True), x)
    return ops.mean(ops.square(found))


def unscaled(model, loss):
    return loss


def scaled_twice(model, loss):
    return model.optimizer.scale_loss(model.optimizer.scale_loss(loss))


def keras_own(model, loss):
    optimizer = keras.optimizers.LossScaleOptimizer(SGD(0.01))
    return compiled(model, loss, optimizer)


class Logs(Step):
    """Logs the loss scale."""

    def take(self, model, x, y):
        logs = super().take(model, x, y)
        return logs | {"scale": model.optimizer.loss_scale * 1.0}


class MicroBatches(Step):
    """Adds up the gradients of two halves; both losses need scaling."""

    def take(self, model, x, y):
        halves = []
        for rows in (slice(0, 4), slice(4, 8)):
            self.first = rows.start == 0
            loss, found = self.gradients(model, x[rows], y[rows])
            halves.append(found)
        total = [a + b for a, b in zip(*halves, strict=True)]
        model.optimizer.apply(total, model.trainable_variables)
        return {"own_loss": loss}


class Scans(MicroBatches):
    """The same in a loop that JAX compiles."""

    def take(self, model, x, y):
        import jax

        def add(total, batch):
            loss, found = self.gradients(model, *batch)
            return [a + g for a, g in zip(total, found, strict=True)], loss

        batches = [ops.reshape(part, (2, 4, -1)) for part in (x, y)]
        variables = model.trainable_variables
        zeros = [ops.zeros(v.shape) for v in variables]
        total, losses = jax.lax.scan(add, zeros, batches)
        model.optimizer.apply(total, variables)
        return {"own_loss": ops.mean(losses)}


class ScalesOneHalf(MicroBatches):
    def scaled(self, model, loss):
        return super().scaled(model, loss) if self.first else loss


def keeping(update, shape=None, first=0.0):
    """Returns a step that keeps numbers, with the shapes of its variables.

    Args:
        update: Function of `model.kept`, the optimizer, gradients, variables.
        shape: Tuple that replaces the variables' shapes. Defaults to `None`.
        first: Float. The first number. Defaults to 0.
    """

    def build():
        def own(optimizer, gradients, variables):
            update(model.kept, optimizer, gradients, variables)

        model = compiled(step=Step(update=own))
        settings = {"trainable": False, "dtype": "float32", "autocast": False}
        model.kept = [
            model.add_weight(v.shape if shape is None else shape, **settings)
            for v in model.trainable_variables
        ]
        for kept in model.kept:
            kept.assign(ops.full(kept.shape, first))
        model.run_eagerly = True
        return model

    return build


def keeps(rest):
    """A step that adds gradients to what it keeps, and keeps a part."""

    def update(kept, optimizer, gradients, variables):
        total = [a + g for a, g in zip(kept, gradients, strict=True)]
        for own, value in zip(kept, total, strict=True):
            own.assign(value * rest)
        optimizer.apply(total, variables)

    return keeping(update, first=2.0**12)  # Of a step at 2**15.


def every_second(change):
    """A step that applies what it makes of the gradients of two batches."""

    def update(kept, optimizer, gradients, variables):
        total = [k + g for k, g in zip(kept, gradients, strict=True)]
        is_second = ops.any(ops.stack([ops.any(k != 0) for k in kept]))
        if BACKEND == "jax":
            own = [v.value for v in optimizer.variables]
            weights = [v.value for v in variables]
            parts = optimizer.stateless_apply(own, change(total), weights)
            pairs = zip(parts, (variables, optimizer.variables), strict=True)
            for values, each in pairs:
                for v, value in zip(each, values, strict=True):
                    v.assign(ops.where(is_second, value, v.value))
        elif is_second:
            optimizer.apply(change(total), variables)
        for own, value in zip(kept, total, strict=True):
            own.assign(ops.where(is_second, 0.0, value))

    return keeping(update)


def average_norm(unscale):
    """A step that clips by the average norm of the gradients so far."""

    def update(kept, optimizer, gradients, variables):
        gradients = optimizer.unscale(gradients) if unscale else gradients
        own = norm(gradients)
        before = kept[0].value
        average = ops.where(before > 0, 0.9 * before + 0.1 * own, own)
        kept[0].assign(ops.where(ops.isfinite(own), average, before))
        optimizer.apply(clipped(gradients, average), variables)

    return keeping(update, ())


def average_of_list(kept, optimizer, gradients, variables):
    gradients = [*map(ops.stop_gradient, gradients)]
    LISTED[:] = [*LISTED[-2:], gradients]
    means = [sum(each) / len(LISTED) for each in zip(*LISTED, strict=True)]
    optimizer.apply(means, variables)


LISTED: list = []


def teaches(kept, optimizer, gradients, variables):
    optimizer.apply(gradients, variables)
    for own, v in zip(kept, variables, strict=True):
        own.assign(0.9 * own + 0.1 * ops.stop_gradient(v.value))


def rate_of_norm(unscale):
    def update(optimizer, gradients, variables):
        seen = optimizer.unscale(gradients) if unscale else gradients
        optimizer.inner_optimizer.learning_rate = 0.01 / (1.0 + norm(seen))
        optimizer.apply(seen, variables)

    return step(update=update)


def decay_of_norm(optimizer, gradients, variables):
    decay = ops.minimum(0.1, 1e-4 * norm(gradients))
    for v in variables:
        v.assign(ops.stop_gradient(v.value) * (1.0 - decay))
    optimizer.apply(gradients, variables)


def descend(optimizer, gradients, variables, rate=1e-6):
    for v, g in zip(variables, gradients, strict=True):
        v.assign(ops.stop_gradient(v.value) - rate * g)


def descend_unscaled(optimizer, gradients, variables):
    descend(optimizer, optimizer.unscale(gradients), variables, 0.01)


def leave_out(optimizer, gradients, variables):
    finite = [bool(ops.all(ops.isfinite(g))) for g in gradients]
    pairs = zip(gradients, finite, strict=True)
    gradients = [g if is_finite else None for g, is_finite in pairs]
    optimizer.apply(gradients, variables)


def apply_if_finite(optimizer, gradients, variables, scale=None):
    if all(bool(ops.all(ops.isfinite(g))) for g in gradients):
        optimizer.apply(gradients, variables)
    elif scale:
        optimizer.dynamic_scale.assign(optimizer.loss_scale * scale)


def hides_infinity(x):
    own = own_gradient(
        lambda x: x * 1.0,
        lambda upstream, x: ops.where(ops.isfinite(upstream), upstream, 0.0),
    )
    return ops.cast(own(ops.cast(x, "float32")), x.dtype)


class TwoOptimizers(Step):
    """One for the last layer, both on gradients of a loss scaled once."""

    def __init__(self, together):
        self.together = together

    def take(self, model, x, y):
        variables = model.trainable_variables
        loss, found = self.gradients(model, x, y)
        first = model.optimizer, found[:2], variables[:2]
        second = model.second, found[2:], variables[2:]
        if self.together:
            LossScaleOptimizer.apply_together(first, second)
        else:
            for optimizer, gradients, own in (first, second):
                optimizer.apply(gradients, own)
        return {"own_loss": loss}


def two_optimizers(together):
    def build():
        model = network()
        optimizers = [LossScaleOptimizer(SGD(0.01)) for _ in range(2)]
        optimizers[0].build(model.trainable_variables[:2])
        optimizers[1].build(model.trainable_variables[2:])
        model.second = optimizers[1]
        return compiled(model, TwoOptimizers(together), optimizers[0])

    return build


class BakesScale(Step):
    """On JAX a compiled step takes what is not in a scope for constant."""

    def gradients(self, model, x, y, variables=None):
        import jax

        variables = model.trainable_variables

        def scaled(values):
            mapping = [*zip(variables, values, strict=True)]
            mapping += [(v, v.value) for v in model.non_trainable_variables]
            with keras.StatelessScope(state_mapping=mapping):
                return self.scaled(model, self.loss(model, x, y))

        return jax.value_and_grad(scaled)([v.value for v in variables])


def never_zeroed():
    """On torch gradients are added to those that are there."""
    model = compiled(step=Step())

    def train_step(model, data):
        loss = model.optimizer.scale_loss(Step().loss(model, *data[:2]))
        loss.backward()
        variables = model.trainable_variables
        gradients = [v.value.grad for v in variables]
        model.optimizer.apply(gradients, variables)
        return {"own_loss": loss.detach()}

    type(model).train_step = train_step
    return model


class SharpnessAware(Step):
    def __init__(self, only_looks=False, subtracts=False):
        self.only_looks = only_looks
        self.subtracts = subtracts

    def take(self, model, x, y):
        optimizer, variables = model.optimizer, model.trainable_variables
        loss, found = self.gradients(model, x, y)
        first = optimizer.unscale(found)
        away = [0.05 * g / (norm(first) + 1e-12) for g in first]
        before = [ops.copy(ops.stop_gradient(v.value)) for v in variables]
        for v, a in zip(variables, away, strict=True):
            v.assign(ops.stop_gradient(v.value + a))
        second = self.gradients(model, x, y)[1]
        if not self.only_looks:
            second = optimizer.unscale(second)
        for v, a, value in zip(variables, away, before, strict=True):
            moved = ops.stop_gradient(v.value - a)
            v.assign(moved if self.subtracts else value)
        optimizer.apply(second, variables)
        return {"own_loss": loss}


def a_loss_scale_factor():
    sgd = SGD(0.01, loss_scale_factor=1024.0)
    return compiled(optimizer=sgd, auto_scale_loss=False)


def no_loss_scaling():
    def update(optimizer, gradients, variables):
        optimizer.apply(clipped(gradients), variables)

    model = network(policy="mixed_bfloat16")
    return compiled(model, Step(update=update), SGD(0.01))


class Half(keras.layers.Layer):
    """One of its weights has no gradient."""

    def build(self, shape):
        self.used = self.add_weight((), initializer="ones", name="used")
        self.idle = self.add_weight((3,), name="idle")

    def call(self, x):
        return x * self.used + 0 * ops.sum(self.idle)


def one_of_two_optimizers_scales():
    class Two(Step):
        def take(self, model, x, y):
            second = model.layers[-1].trainable_variables
            first = model.trainable_variables[: -len(second)]
            _, found = self.gradients(model, x, y, first)
            model.optimizer.apply(found, first)
            loss, found = gradients_of(lambda: self.loss(model, x, y), second)
            model.second.apply(found, second)
            return {"own_loss": loss}

    model = compiled(step=Two())
    model.second = SGD(0.01)
    model.second.build(model.layers[-1].trainable_variables)
    return model


def inner(own=None, **settings):
    """A model whose inner optimizer has some settings."""

    def build():
        optimizer = LossScaleOptimizer(SGD(0.01, **settings))
        return compiled(step=own, optimizer=optimizer)

    return build


def of_loss(size):
    return lambda: compiled(loss=lambda y, p: ops.mean(ops.abs(p - y)) * size)


def apply_if_small(optimizer, gradients, variables):
    """Leaves out a step whose scaled gradients are large."""
    if sum(ops.sum(ops.abs(g)) for g in gradients) < 1e4:
        optimizer.apply(gradients, variables)


dropout = keras.layers.Dropout

WRONG = {
    "clips all": change(clipped),
    "clips values": change_each(lambda g: ops.clip(g, -0.5, 0.5)),
    "drops small": change_each(lambda g: ops.where(ops.abs(g) < 2, 0.0, g)),
    "adds noise": change_each(noisy),
    "hides overflow": change_each(ops.nan_to_num),
    "clips beside float16": change(with_copy(clipped)),
    "clips beside noise": step(
        loss=with_native_noise,
        update=lambda optimizer, gs, vs: optimizer.apply(clipped(gs), vs),
    ),
    "divides twice": by_hand(apply_unscaled_twice),
    "optimizer clips": clipping,
    "adds penalty": add(penalty_of_weights),
    "adds second loss": add(lambda m: ops.mean(ops.abs(m(X, training=True)))),
    "adds gradient penalty": add(lambda model: slope(model, X)),
    "forgets": step(scaled=unscaled),
    "forgets beside dropout": lambda: step(dropout(0.5), scaled=unscaled)(),
    "forgets Keras' own": lambda: keras_own(None, Step(scaled=unscaled)),
    "logs, not uses": lambda: compiled(step=Logs(scaled=unscaled)),
    "scales twice": step(scaled=scaled_twice),
    "scales one half": lambda: compiled(step=ScalesOneHalf()),
    "averages scaled ones": keeps(0.9),
    "clips every second step": every_second(clipped),
    "averages scaled norms": average_norm(unscale=False),
    "rate of scaled norm": rate_of_norm(unscale=False),
    "decay of scaled norm": step(update=decay_of_norm),
    "descends by hand": step(update=descend),
    "descends, skips nothing": step(update=descend_unscaled),
    "unscales, skips nothing": by_hand(apply_inner),
    "sharpness aware, skips nothing": lambda: compiled(
        step=SharpnessAware(subtracts=True)
    ),
    "zeroes overflow": change_each(
        lambda g: ops.where(ops.isfinite(g), g, 0.0)
    ),
    "hides overflow every second step": every_second(
        lambda gs: [ops.where(ops.isfinite(g), g, 0.0) for g in gs]
    ),
    "layer hides infinity": lambda: compiled(network(Own(hides_infinity))),
    "custom gradient": lambda: compiled(loss=lambda y, p: SQUARES(p - y)),
    "layer adds gradient": lambda: step(Own(adds_gradient))(),
}
if BACKEND == "jax":
    WRONG["bakes scale"] = lambda: compiled(step=BakesScale())
else:  # Two optimizers, and Python code in each step, are not for JAX.
    WRONG |= {
        "averages a list": keeping(average_of_list),
        "leaves out infinite ones": step(update=leave_out),
        "applies finite ones": step(update=apply_if_finite),
        "another optimizer": two_optimizers(together=False),
    }
if BACKEND == "torch":
    WRONG["never zeroes gradients"] = never_zeroed
    WRONG["leaves out large ones"] = step(update=apply_if_small)
if BACKEND == "tensorflow":  # Its kernels never draw the same numbers again.
    del WRONG["clips beside noise"]

RIGHT = {
    "as Keras": compiled,
    "own step": step(loss=Step().loss),
    "scales by hand": step(
        scaled=lambda m, loss: loss * m.optimizer.loss_scale
    ),
    "unscales by hand": by_hand(apply_inner_if_finite),
    "scales samples": step(
        scaled=lambda m, loss: ops.mean(
            m.optimizer.scale_loss(loss * ops.ones(3))
        )
    ),
    "clips after unscaling": change(clipped, unscale=True),
    "rounds to float16": change(with_copy(list)),
    "normalizes after unscaling": change_each(ops.sign, unscale=True),
    "inner clips": inner(clipnorm=0.1),
    "inner clips all": inner(Step(), global_clipnorm=0.1, use_ema=True),
    "accumulates as Keras": inner(gradient_accumulation_steps=2),
    "accumulates in a step": lambda: compiled(step=MicroBatches()),
    "accumulates over steps": keeps(0.0),
    "applies every second step": every_second(list),
    "averages norms": average_norm(unscale=True),
    "teaches": keeping(teaches),
    "rate of norm": rate_of_norm(unscale=True),
    "sharpness aware": lambda: compiled(step=SharpnessAware()),
    "sharpness aware, looks": lambda: compiled(step=SharpnessAware(True)),
    "gradient penalty": step(
        loss=lambda m, x, y: Step().loss(m, x, y) + slope(m, x)
    ),
    "Keras' own optimizer": lambda: keras_own(None, None),
    "fixed scale": lambda: compiled(
        None, Step(), LossScaleOptimizer(SGD(0.01), loss_scale=1000.0)
    ),
    "loss scale factor": a_loss_scale_factor,
    "no loss scaling": no_loss_scaling,
    "random layers": lambda: step(
        dropout(0.5), keras.layers.GaussianNoise(0.1), loss=Step().loss
    )(),
    "native noise": step(loss=with_native_noise),
    "noise after unscaling": change_each(noisy, unscale=True),
    "scale as a metric": lambda: compiled(step=Logs()),
    "loss of 0": lambda: compiled(
        loss=lambda y, p: ops.mean(ops.relu(ops.abs(p - y) - 1e3))
    ),
    "weight without gradient": lambda: step(Half(), loss=Step().loss)(),
    "one of two scales": one_of_two_optimizers_scales,
    "optimizer clips unscaled": lambda: clipping(unscale=True),
    "largest gradients": of_loss(1e35),
    "smallest gradients": of_loss(1e-36),
}
if BACKEND == "jax":
    RIGHT["scans"] = lambda: compiled(step=Scans())
else:
    RIGHT |= {
        "two optimizers": two_optimizers(together=True),
        "lowers the scale itself": step(
            update=functools.partial(apply_if_finite, scale=0.5)
        ),
    }

# A program for each pass takes a second to compile on JAX.
_OFTEN = {"clips all", "adds penalty", "forgets beside dropout"}
_OFTEN |= {"clips every second step", "bakes scale", "descends by hand"}
_OFTEN |= {
    "applies every second step",
    "as Keras",
    "clips after unscaling",
    "sharpness aware",
}


def cases(table):
    often = set(table) if BACKEND == "torch" else _OFTEN
    slow = pytest.mark.slow
    each = pytest.mark.parametrize(
        "build",
        [
            pytest.param(build, id=name, marks=() if name in often else slow)
            for name, build in table.items()
        ],
    )
    return lambda test: pytest.mark.chosen_by_backend(each(test))


def found(model):
    verdicts = diagnose(model, X, Y)
    kinds = [verdict.kind for verdict in verdicts]
    assert "loss_scale_ignored" not in kinds[1:]
    return verdicts


@pytest.mark.long
@cases(WRONG)
def test_an_update_that_depends_on_the_loss_scale_is_named(build):
    assert found(build())[0].kind == "loss_scale_ignored"


@cases(RIGHT)
def test_an_update_that_does_not_is_not(build):
    assert "loss_scale_ignored" not in [v.kind for v in found(build())]


# What ignores the scale, in how many variables, and a word of the advice.
EXPLAINED = {
    "adds penalty": (None, 2, "penalty"),  # A bias of 0 has no penalty.
    "custom gradient": ("<model>", 4, "custom_gradient"),
    "layer adds gradient": ("hidden", 2, "custom_gradient"),
    "forgets": ("<model>", 4, "never multiplied"),
    "scales twice": ("<model>", 4, "more often"),
    "divides twice": (None, 4, "own division"),
    "clips all": (None, 4, "unscale("),
    "zeroes overflow": (None, 4, "finite"),
    "descends, skips nothing": (None, 4, "copy"),
    "averages scaled norms": (None, 4, "average"),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_it_is_said_what_follows_the_loss_scale_and_what_does_not(name):
    behind, count, said = EXPLAINED[name]
    verdict = found(WRONG[name]())[0]
    assert verdict.numbers.get("behind") == behind
    assert verdict.numbers["variables"] == count
    assert said in verdict.advice


@pytest.mark.parametrize("tuned", [False, True])
def test_fit_says_so_and_moves_no_layer(tuned, tmp_path):
    model = WRONG["clips all"]()
    before = [layer.dtype_policy.name for layer in model.layers]
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [monitor] + [PrecisionTuner(verbose=0)] * tuned
    data = X.repeat(4, 0), Y.repeat(4, 0)
    model.fit(*data, 8, epochs=2, verbose=0, callbacks=callbacks)
    assert [v.kind for v in monitor.verdicts] == ["loss_scale_ignored"]
    assert [layer.dtype_policy.name for layer in model.layers] == before
    assert monitor.summary.headline["state"] == "severe"


def test_fit_says_that_the_optimizer_was_never_applied(tmp_path):
    model = by_hand(apply_inner_if_finite)()
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    model.fit(X, Y, 8, epochs=2, verbose=0, callbacks=[monitor])
    assert monitor.summary.headline["state"] == "warning"
    assert "optimizer.apply" in monitor.summary.headline["text"]
