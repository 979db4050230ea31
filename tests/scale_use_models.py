"""Train steps that use the loss scale wrongly and rightly, on any backend."""

import types

import keras
import numpy as np
from keras import ops

from keras_mixprec import LossScaleOptimizer, apply_policy

BACKEND = keras.backend.backend()

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) * 3).astype("float32")


class Step:
    """A step in parts, each to be replaced. All run as `train_step` does."""

    def loss(self, model, x, y):
        """The loss of a batch."""
        return ops.mean(ops.square(model(x, training=True) - y))

    def scaled(self, model, loss):
        """What gradients are taken of."""
        return model.optimizer.scale_loss(loss)

    def update(self, optimizer, gradients, variables):
        """Updates the variables."""
        optimizer.apply(gradients, variables)

    def take(self, model, x, y):
        """Takes the step."""
        loss, gradients = gradients_of(
            lambda: self.scaled(model, self.loss(model, x, y)),
            model.trainable_variables,
        )
        self.update(model.optimizer, gradients, model.trainable_variables)
        return {"own_loss": loss}


def gradients_of(function, variables):
    """What a function returns, and the gradients of the variables."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = function()
        return loss, tape.gradient(loss, [v.value for v in variables])
    if BACKEND == "torch":
        import torch

        loss = function()
        values = [v.value for v in variables]
        found = torch.autograd.grad(loss, values, allow_unused=True)
        return loss.detach(), list(found)
    import jax

    def stateless(values):
        mapping = zip(variables, values, strict=True)
        outer = keras.src.backend.get_stateless_scope()
        known = outer.state_mapping if outer else {}
        with keras.StatelessScope(state_mapping=list(mapping)) as scope:
            scope.state_mapping = known | scope.state_mapping
            return function()

    return jax.value_and_grad(stateless)([v.value for v in variables])


def input_gradient(function, x):
    """The gradient of the sum of a function of `x`, to be differentiated."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            total = ops.sum(function(x))
        return tape.gradient(total, x)
    if BACKEND == "torch":
        import torch

        x = x.detach().requires_grad_()
        total = ops.sum(function(x))
        return torch.autograd.grad(total, x, create_graph=True)[0]
    import jax

    return jax.grad(lambda x: ops.sum(function(x)))(x)


def with_step(model, step):
    """Gives a model a `train_step` of its own."""

    class Own(type(model)):
        def train_step(self, *arguments):
            return _TAKE[BACKEND](self, step, *arguments)

    model.__class__ = Own
    return model


def _take(model, step, data):
    return step.take(model, *data[:2])


def _take_on_torch(model, step, data):
    import torch

    model.zero_grad()
    with torch.enable_grad():
        return step.take(model, *data[:2])


def _take_on_jax(model, step, state, data):
    optimizers = [
        x for x in vars(model).values() if isinstance(x, keras.Optimizer)
    ]
    others = [o for o in optimizers if o is not model.optimizer]
    parts = [
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    ]
    pairs = [
        p
        for part, values in zip(parts, state, strict=True)
        for p in zip(part, values, strict=True)
    ]
    pairs += [(v, v.value) for o in others for v in o.variables]
    with keras.StatelessScope(state_mapping=pairs) as scope:
        logs = step.take(model, *data[:2])
    return logs, tuple(
        [scope.get_current_value(v) for v in part] for part in parts
    )


_TAKE = {
    "tensorflow": _take,
    "torch": _take_on_torch,
    "jax": _take_on_jax,
}


def custom_gradient(function, gradient):
    """A function with a gradient of its own, `gradient(upstream, x)`."""

    @ops.custom_gradient
    def own(x):
        def grad(*args, upstream=None):
            (given,) = args or (upstream,)
            return gradient(given, x)

        return function(x), grad

    return own


def network(*layers, policy="mixed_float16"):
    """A small network; the layers stand between two dense ones."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "tanh", name="hidden"),
            *layers,
            keras.layers.Dense(1, name="out"),
        ]
    )
    apply_policy(model, policy)
    return model


def compiled(model=None, step=None, optimizer=None, loss="mse", **parts):
    """A model that is compiled, with a step of the parts if any are given."""
    model = model or network()
    if step or parts:
        step = step or Step()
        for name, function in parts.items():
            setattr(step, name, types.MethodType(function, step))
        with_step(model, step)
    optimizer = optimizer or LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss=loss)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def norm(gradients):
    """The norm of all gradients."""
    squares = [ops.sum(ops.square(g)) for g in gradients if g is not None]
    return ops.sqrt(sum(squares))


def clipped(gradients, largest=1.0):
    """The gradients, with a norm of `largest` at most."""
    factor = ops.minimum(1.0, largest / (norm(gradients) + 1e-12))
    return [None if g is None else g * factor for g in gradients]
