"""A GAN, whose players have an optimizer each, and a critic alone."""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

import keras_mixprec as kmp
from zoo.case import case
from zoo.data import dataset, vectors
from zoo.own_step import OwnStep, with_input_gradient
from zoo.parts import chain, dense, normal


@dataset
def ring(random):
    """Noise, and points on a ring to be made of it."""
    angle = random.uniform(0, 2 * np.pi, (1024, 1))
    real = 300 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    noise = random.normal(size=(1024, 4))
    return noise, real


class BatchRMS(layers.Layer):
    """x / sqrt(mean(x*x) + eps) over the batch, with the sum taken first."""

    def call(self, x):
        mean = ops.sum(x * x, keepdims=True) / ops.cast(ops.size(x), x.dtype)
        return x / ops.sqrt(mean + 1e-6)


class Gan(keras.Model):
    """A generator and a critic, each with an optimizer of its own."""

    def __init__(self, norm):
        super().__init__()
        paints = [
            layers.Dense(32, "relu", name="g1"),
            layers.Dense(2, name="g2"),
        ]
        paints = [keras.Input((4,)), *paints]
        self.generator = keras.Sequential(paints, name="generator")
        judges = [layers.Dense(32, "relu", name=n) for n in ("c1", "c2")]
        judges = [keras.Input((2,)), norm, *judges, layers.Dense(1, name="c3")]
        self.critic = keras.Sequential(judges, name="critic")
        painter, self.judge = (adam_for(p) for p in self.players)
        # JAX hands `train_step` the state of the model and one optimizer.
        self.judge_state = self.judge.variables
        self.compile(painter, jit_compile=False)

    @property
    def players(self):
        return self.generator, self.critic

    def call(self, noise):
        return self.critic(self.generator(noise))

    def losses_of(self, noise, real):
        fake = 100 * ops.cast(self.generator(noise), "float32")
        both = self.critic(ops.concatenate([real, fake]))
        on_real, on_fake = ops.split(ops.cast(both, "float32"), 2)
        paint = ops.mean(ops.softplus(-on_fake))
        judge = ops.mean(ops.softplus(-on_real) + ops.softplus(on_fake))
        off = ops.abs(ops.mean(ops.norm(fake, axis=-1)) / 300 - 1)
        # They circle about the ring, so any closer is as good.
        return paint, judge, {"radius_loss": ops.maximum(off, 0.2)}

    def train_step(self, *arguments):
        return STEPS[keras.backend.backend()](self, *arguments)

    def apply(self, *steps):
        for optimizer, gradients, weights in steps:
            optimizer.apply(gradients, weights)

    def stateless_apply(self, *steps):
        return [
            optimizer.stateless_apply(state, gradients, weights)
            for optimizer, state, gradients, weights in steps
        ]


def adam_for(player):
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(2e-3, 0.5))
    optimizer.build(player.trainable_variables)
    return optimizer


def tensorflow_step(gan, data):
    import tensorflow as tf

    paints, judges = (p.trainable_variables for p in gan.players)
    with tf.GradientTape(persistent=True) as tape:
        paint, judge, logs = gan.losses_of(*data)
        paint = gan.optimizer.scale_loss(paint)
        judge = gan.judge.scale_loss(judge)
    gan.apply(
        (gan.optimizer, tape.gradient(paint, paints), paints),
        (gan.judge, tape.gradient(judge, judges), judges),
    )
    return logs


def torch_step(gan, data):
    import torch

    def step(optimizer, loss, player):
        weights = player.trainable_variables
        gradients = torch.autograd.grad(
            optimizer.scale_loss(loss),
            [v.value for v in weights],
            retain_graph=True,
        )
        return optimizer, gradients, weights

    paint, judge, logs = gan.losses_of(*data)
    steps = [
        step(gan.optimizer, paint, gan.generator),
        step(gan.judge, judge, gan.critic),
    ]
    with torch.no_grad():
        gan.apply(*steps)
    return logs


def jax_step(gan, state, data):
    import jax

    weights, judge_state, state, metrics = state
    count = len(gan.generator.trainable_variables)
    players = weights[:count], weights[count:]

    def losses(paints, judges):
        values = zip(gan.trainable_variables, [*paints, *judges], strict=True)
        with keras.StatelessScope(state_mapping=[*values]):
            return gan.losses_of(*data)

    def paint_loss(paints):
        paint, _, logs = losses(paints, players[1])
        return gan.optimizer.stateless_scale_loss(state, paint), logs

    def judge_loss(judges):
        _, judge, _ = losses(players[0], judges)
        return gan.judge.stateless_scale_loss(judge_state, judge)

    from_paint, logs = jax.grad(paint_loss, has_aux=True)(players[0])
    from_judge = jax.grad(judge_loss)(players[1])
    (paints, state), (judges, judge_state) = gan.stateless_apply(
        (gan.optimizer, state, from_paint, players[0]),
        (gan.judge, judge_state, from_judge, players[1]),
    )
    return logs, ([*paints, *judges], judge_state, state, metrics)


STEPS = {"tensorflow": tensorflow_step, "torch": torch_step, "jax": jax_step}


@case(ring())
def gan_two_optimizers():
    return Gan(BatchRMS(name="d_norm"))


@case(ring())
def healthy_gan():
    return Gan(layers.Rescaling(1 / 300))


@dataset
def tiny_units(_):
    x, y = vectors(classes=2, scale=2e-5)()
    return x, 1.0 * y[:, None]


class PenalizedCritic(OwnStep):
    """R1: the squared gradient of the score at the data is penalized."""

    def call(self, x):
        return self.critic(x)

    def score_of(self, x):
        return ops.cast(self.critic(x, training=True), "float32")

    def loss_of(self, x, y):
        score, slope = with_input_gradient(self.score_of, x)
        penalty = ops.mean(ops.sum(slope * slope, axis=-1))
        loss = ops.mean(ops.softplus((1 - 2 * y) * score)) + 1e-14 * penalty
        right = ops.equal(score > 0, y > 0.5)
        return loss, {"accuracy": ops.mean(ops.cast(right, "float32"))}


@case(tiny_units())
def r1_penalty():
    # No `Sequential`, which would cast the data to float16 at its door.
    def critic(name):
        units = layers.Rescaling(5e4, name="units")
        score = dense(1, kernel_initializer=normal(4.0), name="score")
        hidden = dense(64, "tanh", name="h1")
        named = partial(keras.Model, name=name)
        return chain((32,), units, hidden, score, kind=named)

    model = PenalizedCritic(critic=critic)
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, jit_compile=False)
    return model
