"""Train steps that use the loss scale wrongly and rightly, on any backend."""

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

    def __init__(self, **parts):
        for name, function in parts.items():
            setattr(self, name, function)

    def loss(self, model, x, y):
        """The loss of a batch."""
        return ops.mean(ops.square(ops.subtract(model(x, training=True), y)))

    def scaled(self, model, loss):
        """Returns the loss that gradients are computed of."""
        return model.optimizer.scale_loss(loss)

    def update(self, optimizer, gradients, variables):
        """Updates the variables."""
        optimizer.apply(gradients, variables)

    def gradients(self, model, x, y, variables=None):
        """The loss, and the gradients of what it is scaled to."""
        return gradients_of(
            lambda: self.scaled(model, self.loss(model, x, y)),
            variables or model.trainable_variables,
        )

    def take(self, model, x, y):
        """Takes the step."""
        loss, gradients = self.gradients(model, x, y)
        self.update(model.optimizer, gradients, model.trainable_variables)
        return {"own_loss": loss}


def gradients_of(function, variables):
    """Returns the result of a function, and the gradients of the variables."""
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


def with_step(model, step):
    """Gives a model a custom `train_step`."""

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
        return _take(model, step, data)


def _take_on_jax(model, step, state, data):
    others = [
        own
        for own in vars(model).values()
        if isinstance(own, keras.Optimizer) and own is not model.optimizer
    ]
    parts = [
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    ]
    pairs = [(v, v.value) for o in others for v in o.variables]
    for part, values in zip(parts, state, strict=True):
        pairs += zip(part, values, strict=True)
    with keras.StatelessScope(state_mapping=pairs) as scope:
        logs = _take(model, step, data)
    now = scope.get_current_value
    return logs, tuple([now(v) for v in part] for part in parts)


_TAKE = {"tensorflow": _take, "torch": _take_on_torch, "jax": _take_on_jax}


def network(*layers, policy="mixed_float16"):
    """A small network; the layers stand between two dense ones."""
    first = keras.layers.Dense(8, "tanh", name="hidden")
    last = keras.layers.Dense(1, name="out")
    model = keras.Sequential([keras.Input((4,)), first, *layers, last])
    apply_policy(model, policy)
    return model


def compiled(model=None, step=None, optimizer=None, loss="mse", **compiling):
    """A compiled model, with a custom step if one is given."""
    model = model or network()
    if step:
        with_step(model, step)
    optimizer = optimizer or LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss=loss, **compiling)
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
