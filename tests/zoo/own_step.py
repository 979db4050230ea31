"""Models that compute their loss in a train step of their own."""

import keras
from keras import ops

from zoo.parts import Parts


class OwnStep(Parts):
    """Its subclasses define `loss_of(x, y)`, which returns loss and logs.

    A loss alone is logged as `batch_loss`.
    """

    def train_step(self, *arguments):
        return _STEPS[keras.backend.backend()](self, *arguments)

    def scaled(self, loss):
        return self.optimizer.scale_loss(loss)


class FunctionalOwnStep(keras.Model):
    """The same for functional models: Keras makes their base functional."""

    train_step, scaled = OwnStep.train_step, OwnStep.scaled


def loss_and_logs(model, data):
    found = model.loss_of(*data)
    if isinstance(found, tuple):
        return found
    loss = ops.cast(found, "float32")
    return loss, {"batch_loss": loss}


def tensorflow_step(model, data):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss, logs = loss_and_logs(model, data)
        loss = model.scaled(loss)
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return logs


def torch_step(model, data):
    import torch

    model.zero_grad()
    loss, logs = loss_and_logs(model, data)
    model.scaled(loss).backward()
    weights = model.trainable_variables
    with torch.no_grad():
        model.optimizer.apply([v.value.grad for v in weights], weights)
    return logs


def jax_step(model, state, data):
    import jax

    weights, others, own, metrics = state
    constant = [
        *zip(model.non_trainable_variables, others, strict=True),
        *zip(model.optimizer.variables, own, strict=True),
    ]

    def scaled_loss(weights):
        trained = zip(model.trainable_variables, weights, strict=True)
        with keras.StatelessScope(
            state_mapping=[*trained, *constant], collect_losses=True
        ):
            loss, logs = loss_and_logs(model, data)
            return model.scaled(loss), logs

    gradients, logs = jax.grad(scaled_loss, has_aux=True)(weights)
    weights, own = model.optimizer.stateless_apply(own, gradients, weights)
    return logs, (weights, others, own, metrics)


_STEPS = {"tensorflow": tensorflow_step, "torch": torch_step, "jax": jax_step}


def with_input_gradient(function, x):
    """Returns the result of a function, and the gradient of its sum.

    The gradient can be differentiated again.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            found = function(x)
        return found, tape.gradient(found, x)
    if keras.backend.backend() == "torch":
        import torch

        x = x.detach().requires_grad_()
        found = function(x)
        return found, torch.autograd.grad(found.sum(), x, create_graph=True)[0]
    import jax

    def total(x):
        found = function(x)
        return ops.sum(found), found

    gradient, found = jax.grad(total, has_aux=True)(x)
    return found, gradient
