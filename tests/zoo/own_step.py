"""A model that computes its loss in a train step of its own."""

import keras


class OwnStep(keras.Model):
    """Its subclasses define `loss_of(x, y)`, which returns loss and logs."""

    def train_step(self, *arguments):
        return _STEPS[keras.backend.backend()](self, *arguments)

    def scaled(self, loss):
        return self.optimizer.scale_loss(loss)


class FunctionalOwnStep(keras.Model):
    """The same for functional models: Keras makes their base functional."""

    train_step, scaled = OwnStep.train_step, OwnStep.scaled


def tensorflow_step(model, data):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss, logs = model.loss_of(*data)
        loss = model.scaled(loss)
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return logs


def torch_step(model, data):
    import torch

    model.zero_grad()
    loss, logs = model.loss_of(*data)
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
            loss, logs = model.loss_of(*data)
            return model.scaled(loss), logs

    gradients, logs = jax.grad(scaled_loss, has_aux=True)(weights)
    weights, own = model.optimizer.stateless_apply(own, gradients, weights)
    return logs, (weights, others, own, metrics)


_STEPS = {
    "tensorflow": tensorflow_step,
    "torch": torch_step,
    "jax": jax_step,
}
