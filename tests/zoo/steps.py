"""Custom train steps.

Each model computes its own loss, in the dtype of its layers' outputs.
"""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, many_rows, vectors
from zoo.own_step import FunctionalOwnStep, OwnStep
from zoo.parts import chain, dense, relu


def mlp(width, *units, name, **arguments):
    """Returns `hidden` and a last layer called `out`, to be built at once."""
    hidden = [relu(u, f"h{i}")() for i, u in enumerate(units)]
    last = layers.Dense(arguments.pop("outputs"), name="out", **arguments)
    return keras.Sequential([keras.Input((width,)), *hidden, last], name=name)


def share_equal(a, b):
    return ops.mean(ops.cast(ops.equal(a, b), "float32"))


class Distillation(OwnStep):
    """Cross entropy to a frozen teacher by log(softmax(x) + 1e-10)."""

    def call(self, x):
        return self.student(x)

    def loss_of(self, x, y):
        wanted = ops.softmax(self.teacher(x))
        logits = self.student(x)
        told = self.log_probabilities(logits)
        told = ops.sum(ops.multiply(wanted, told), axis=-1)
        loss = -ops.mean(ops.cast(told, "float32"))
        same = share_equal(ops.argmax(wanted, -1), ops.argmax(logits, -1))
        return loss, {"accuracy": same}

    def log_probabilities(self, logits):
        return ops.log(ops.softmax(logits) + 1e-10)


@case(vectors(samples=1024, scale=12.0))
def distillation(kind=Distillation):
    """Probabilities vanish, and so does the 1e-10."""
    parts = {"teacher": partial(mlp, 32, 64, outputs=4)}
    parts["student"] = partial(mlp, 32, 32, outputs=4)
    model = kind(**parts)
    model.teacher.trainable = False
    return model


class SafeDistillation(Distillation):
    """Cross entropy to a frozen teacher by a log softmax."""

    def log_probabilities(self, logits):
        return ops.log_softmax(logits)


@case(vectors(samples=1024, scale=12.0))
def healthy_distillation():
    """Like distillation: probabilities of zero, whose logarithms are finite."""
    return distillation(SafeDistillation)


class OneHidden(OwnStep):
    def call(self, x):
        return self.head(self.h1(x))


class Unscaled(OneHidden):
    """Hands the optimizer gradients of a loss that it did not scale."""

    def scaled(self, loss):
        return loss

    def loss_of(self, x, y):
        logits = self(x, training=True)
        loss = keras.losses.sparse_categorical_crossentropy(y, logits, True)
        right = share_equal(ops.argmax(logits, axis=-1), ops.cast(y, "int32"))
        return ops.mean(loss), {"accuracy": right}


@case(vectors(samples=1024), optimizer=lambda: keras.optimizers.SGD(0.1))
def unscaled_loss():
    """Custom steps that forget `scale_loss`: 2**-15 of each step."""
    return Unscaled(h1=relu(32), head=dense(4, dtype="float32"))


class RealNVP(OwnStep):
    """Two affine couplings by one network, and a mixture as their prior."""

    def call(self, x):
        a, b = ops.split(x, 2, axis=-1)
        log_scales = 0.0
        for _ in range(2):
            log_scale, shift = ops.split(self.coupling(a), 2, axis=-1)
            a, b = ops.add(ops.multiply(b, ops.exp(log_scale)), shift), a
            log_scales = ops.add(log_scales, ops.sum(log_scale, axis=-1))
        return ops.concatenate([a, b], axis=-1), log_scales

    def loss_of(self, x, y):
        z, log_scales = self(x, training=True)
        density = ops.exp(-((z - 2) ** 2) / 2) + ops.exp(-((z + 2) ** 2) / 2)
        prior = ops.sum(ops.log(density), axis=-1)
        return ops.mean(ops.cast(-prior - log_scales, "float32"))


@dataset
def wide_modes(random):
    x = random.choice([-10.0, 10.0], (512, 4)) + random.normal(size=(512, 4))
    return x, np.zeros(512, "int32")


@case(wide_modes())
def real_nvp():
    """Flows: log of a density that is zero away from its modes."""
    zeros = {"outputs": 4, "kernel_initializer": "zeros"}
    return RealNVP(coupling=partial(mlp, 2, 32, **zeros))


class Ppo(OwnStep):
    """The clipped objective, of actions that were once improbable."""

    def call(self, x):
        return self.actor(x)

    def loss_of(self, x, y):
        action, before, best = ops.unstack(ops.cast(y, "float32"), 3, axis=-1)
        logits = self.actor(x)
        chosen = ops.one_hot(ops.cast(action, "int32"), 4, dtype=logits.dtype)
        now = ops.sum(ops.log_softmax(logits) * chosen, axis=-1)
        ratio = ops.exp(now - ops.cast(before, now.dtype))
        gain = ops.cast(ops.where(action == best, 1.0, -0.3), ratio.dtype)
        clipped = ops.clip(ratio, 0.1, 10.0) * gain
        least = ops.cast(ops.minimum(ratio * gain, clipped), "float32")
        found = ops.cast(ops.argmax(logits, axis=-1), "float32")
        return -ops.mean(least), {"accuracy": share_equal(found, best)}


@dataset(seed=1)
def old_actions(random):
    x, best = vectors(samples=2048)()
    action = random.integers(0, 4, len(x))
    rare = (np.arange(len(x)) % 16 == 0) & (action == best)
    before = np.where(rare, -16.0, -1.4)
    return x, np.stack([action, before, best], axis=1)


@case(old_actions())
def ppo_ratio():
    """PPO: the ratio of probabilities overflows and 0 * inf is NaN."""
    return Ppo(actor=partial(mlp, 32, 64, outputs=4))


class SimClr(OwnStep):
    """Two noisy views; exp(cosine / 0.05) of each pair, self left out."""

    def call(self, x):
        return self.encoder(x)

    def loss_of(self, x, y):
        z = self.encoder(ops.concatenate([x, x + y], axis=0))
        z = z / ops.sqrt(ops.sum(z * z, axis=-1, keepdims=True) + 1e-6)
        pairs = ops.exp(ops.matmul(z, ops.transpose(z)) / 0.05)
        others = pairs * (1 - ops.eye(128, dtype=pairs.dtype))
        same = ops.sum(others * ops.eye(128, k=64, dtype=pairs.dtype), axis=-1)
        share = ops.cast(same / ops.sum(others, axis=-1), "float32")
        return -ops.mean(ops.log(share[:64] + 1e-7))


@dataset(seed=1)
def views(random):
    x, _ = vectors()()
    return x, 0.3 * random.normal(size=x.shape)


@case(views())
def simclr_step():
    """Contrastive learning: exponentials of logits at temperature 0.05."""
    return SimClr(encoder=partial(mlp, 32, 64, outputs=16))


class Beam(FunctionalOwnStep):
    """The second derivative, from differences, is to match the load."""

    def loss_of(self, x, y):
        step = 0.02
        curve = self(x + step) - 2.0 * self(x) + self(x - step)
        load = ops.cast(y, curve.dtype)
        inside = ops.mean(ops.square(curve / step**2 + load))
        ends = self(ops.convert_to_tensor([[0.0], [1.0]]))
        return inside + 10.0 * ops.mean(ops.square(ends))


@dataset
def beam(random, samples=128):
    """Places on a beam, and the load there."""
    x = np.linspace(0, 1, samples, dtype="float32")[:, None]
    random.shuffle(x)
    return x, np.pi**2 * np.sin(np.pi * x)


@case(beam())
def second_differences():
    """A physics-informed network: differences of 1e-4 of numbers near 1."""
    hidden = [dense(16, "tanh", name=name) for name in ("h1", "h2")]
    return chain((1,), *hidden, dense(1, name="u"), kind=Beam)


class PolicyGradient(FunctionalOwnStep):
    """Policy gradient with a learned baseline."""

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        value = outputs["value"][:, 0]
        advantage = ops.cast(y["outcome"], value.dtype) - value
        critic = ops.mean(ops.sqrt(1.0 + ops.square(advantage)) - 1.0)
        log_policy = ops.log_softmax(outputs["logits"])
        chosen = ops.one_hot(y["action"], 4, dtype=log_policy.dtype)
        actor = -ops.mean(ops.sum(chosen * log_policy, axis=-1))
        return ops.cast(actor, "float32") + ops.cast(critic, "float32")


@dataset(seed=1)
def episodes(random, samples=512):
    """States, the better action in each, and the return that followed."""
    x, y = vectors(features=16)()
    value = 900.0 + 40.0 * x @ random.normal(size=16)
    return x, {"action": y, "outcome": value}


@case(episodes())
def returns_of_hundreds(kind=PolicyGradient):
    """A smooth absolute value has a square of 900 inside, in a step."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="trunk")(inputs)
    logits = layers.Dense(4, name="actor")(x)
    value = layers.Dense(1, name="critic")(x)
    return kind(inputs, {"logits": logits, "value": value})


class NormalizedReturns(PolicyGradient):
    """Returns of about 1, as they should be."""

    def loss_of(self, x, y):
        outcome = (y["outcome"] - 900.0) / 160.0
        return super().loss_of(x, {**y, "outcome": outcome})


@case(episodes())
def sound_actor_critic():
    """Normalized returns, a policy and a baseline."""
    return returns_of_hundreds(NormalizedReturns)


class AreaUnderCurve(FunctionalOwnStep):
    """How many pairs of a positive and a negative are in order."""

    def loss_of(self, x, y):
        score = self(x, training=True)
        y = ops.cast(y, score.dtype)
        pairs = y * (1 - ops.transpose(y))
        wrong = ops.sigmoid(ops.transpose(score) - score) * pairs
        wrong = ops.sum(ops.mean(wrong, axis=1))
        pairs = ops.sum(y) * ops.sum(1 - y)
        loss = ops.cast(wrong / pairs, "float32") * y.shape[0]
        exact, y = ops.cast(score, "float32"), ops.cast(y, "float32")
        pairs = y * (1 - ops.transpose(y))
        apart = exact - ops.transpose(exact)
        disordered = ops.sum(ops.cast(apart <= 0, "float32") * pairs)
        return loss, {"batch_disorder": disordered / ops.sum(pairs)}


@dataset
def rare(random, samples=2048):
    x = random.normal(size=(samples, 16)).astype("float32")
    score = x @ random.normal(size=16) / 4
    return x, 1.0 * (score > 0.7)[:, None]


@case(rare())
def area_under_curve():
    """The number of pairs is infinite, so the loss is 0, without NaN."""
    score = dense(1, name="score")
    return chain((16,), relu(16, "h1"), score, kind=AreaUnderCurve)


class ListWise(FunctionalOwnStep):
    """A softmax over the whole batch, as in ranking."""

    def loss_of(self, x, y):
        score = self(x, training=True)[:, 0]
        target = ops.softmax(ops.cast(y[:, 0], "float32") / 3.0)
        loss = -ops.sum(target * ops.log_softmax(ops.cast(score, "float32")))
        entropy = -ops.sum(target * ops.log(target + 1e-30))
        return loss, {"batch_loss": loss - entropy}


@case(many_rows(12.0))
def sound_list_wise():
    """Probabilities of 1e-4, of 1,024 rows; gradients that are small."""
    return chain((16,), relu(32, "h1"), dense(1, name="head"), kind=ListWise)
