"""More train steps that fail in float16, in part as publicly reported."""

import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.own_step import OwnStep
from zoo.reported_steps import mlp, share_equal


class RealNVP(OwnStep):
    """Two affine couplings by one network, and a mixture as their prior."""

    def __init__(self):
        super().__init__()
        self.coupling = mlp(
            2, 32, outputs=4, kernel_initializer="zeros", name="coupling"
        )

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
        loss = ops.mean(ops.cast(-prior - log_scales, "float32"))
        return loss, {"step_loss": loss}


def wide_modes():
    random = np.random.default_rng(0)
    x = random.choice([-10.0, 10.0], (512, 4)) + random.normal(size=(512, 4))
    return x.astype("float32"), np.zeros(512, "int32")


# Devised, of flows: log of a density that is zero away from its modes.
@case(
    data=wide_modes,
    culprits=frozenset({"coupling/out"}),
    kind="underflow",
    direction="forward",
    decoy="coupling/h0",
    loss=None,
    metric="step_loss",
)
def real_nvp():
    return RealNVP()


class ActorCritic(OwnStep):
    """The critic's errors, divided by their deviation, weigh the actor."""

    def __init__(self):
        super().__init__()
        self.actor = mlp(32, 64, outputs=4, name="actor")
        self.critic = mlp(32, 64, outputs=1, name="critic")

    def call(self, x):
        return self.actor(x), self.critic(x)

    def loss_of(self, x, y):
        action, reward, best = ops.unstack(ops.cast(y, "float32"), 3, axis=-1)
        logits, value = self(x, training=True)
        error = ops.cast(reward, value.dtype) - value[:, 0]
        gain = error - ops.mean(error)
        gain = gain / (ops.sqrt(ops.mean(gain * gain)) + 1e-3)
        chosen = ops.log_softmax(ops.cast(logits, "float32"))
        chosen = chosen * ops.one_hot(ops.cast(action, "int32"), 4)
        gain = ops.cast(ops.stop_gradient(gain), "float32")
        actor = -ops.mean(gain * ops.sum(chosen, axis=-1))
        critic = 1e-3 * ops.mean(ops.abs(ops.cast(error, "float32")))
        found = ops.cast(ops.argmax(logits, axis=-1), "float32")
        return actor + critic, {"accuracy": share_equal(found, best)}


def bandit():
    x, best = vectors(samples=2048)()
    action = np.random.default_rng(1).integers(0, 4, len(x))
    reward = np.where(action == best, 1500.0, -500.0)
    return x, np.stack([action, reward, best], axis=1).astype("float32")


# Devised, of PPO: advantages are divided by a deviation that overflowed.
@case(
    data=bandit,
    culprits=frozenset({"critic/out"}),
    kind="forward_overflow",
    direction="forward",
    decoy="actor/out",
    loss=None,
    batch_size=128,
    samples=128,
)
def advantage_normalization():
    return ActorCritic()


class Ppo(OwnStep):
    """The clipped objective, of actions that were once improbable."""

    def __init__(self):
        super().__init__()
        self.actor = mlp(32, 64, outputs=4, name="actor")

    def call(self, x):
        return self.actor(x)

    def loss_of(self, x, y):
        action, before, best = ops.unstack(ops.cast(y, "float32"), 3, axis=-1)
        logits = self.actor(x)
        chosen = ops.one_hot(ops.cast(action, "int32"), 4, dtype=logits.dtype)
        now = ops.sum(ops.log_softmax(logits) * chosen, axis=-1)
        ratio = ops.exp(now - ops.cast(before, now.dtype))
        gain = ops.where(action == best, 1.0, -0.3)
        gain = ops.cast(gain, ratio.dtype)
        clipped = ops.clip(ratio, 0.1, 10.0) * gain
        loss = -ops.mean(
            ops.cast(ops.minimum(ratio * gain, clipped), "float32")
        )
        found = ops.cast(ops.argmax(logits, axis=-1), "float32")
        return loss, {"accuracy": share_equal(found, best)}


def old_actions():
    x, best = vectors(samples=2048)()
    action = np.random.default_rng(1).integers(0, 4, len(x))
    before = np.full(len(x), -1.4)
    rare = (np.arange(len(x)) % 16 == 0) & (action == best)
    before[rare] = -16.0
    return x, np.stack([action, before, best], axis=1).astype("float32")


# Reported of PPO: the ratio of probabilities overflows and 0 * inf is NaN.
@case(
    data=old_actions,
    culprits=frozenset({"actor/out"}),
    kind="forward_overflow",
    direction="forward",
    decoy="actor/h0",
    loss=None,
    batch_size=128,
    samples=128,
)
def ppo_ratio():
    return Ppo()


class SimClr(OwnStep):
    """Two noisy views; exp(cosine / 0.05) of each pair, self left out."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(32, 64, outputs=16, name="encoder")

    def call(self, x):
        return self.encoder(x)

    def loss_of(self, x, y):
        z = self.encoder(ops.concatenate([x, x + y], axis=0))
        z = z / ops.sqrt(ops.sum(z * z, axis=-1, keepdims=True) + 1e-6)
        pairs = ops.exp(ops.matmul(z, ops.transpose(z)) / 0.05)
        others = pairs * (1 - ops.eye(128, dtype=pairs.dtype))
        same = ops.sum(others * ops.eye(128, k=64, dtype=pairs.dtype), axis=-1)
        share = ops.cast(same / ops.sum(others, axis=-1), "float32")
        loss = -ops.mean(ops.log(share[:64] + 1e-7))
        return loss, {"step_loss": loss}


def views():
    x, _ = vectors()()
    noise = np.random.default_rng(1).normal(size=x.shape)
    return x, (0.3 * noise).astype("float32")


# Reported of contrastive learning: exponentials of logits at temperature 0.05.
@case(
    data=views,
    culprits=frozenset({"encoder/out"}),
    kind="forward_overflow",
    direction="forward",
    decoy="encoder/h0",
    loss=None,
    metric="step_loss",
    batch_size=64,
    samples=64,
)
def simclr_step():
    return SimClr()


class Vae(OwnStep):
    """Its error is the root of the sum over all pixels of the batch."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(512, 32, outputs=8, name="encoder")
        self.decoder = mlp(4, 32, outputs=512, name="decoder")

    def call(self, x, noise=0.0):
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        # Else it may be 13 at first, and its exponential too large as well.
        log_variance = ops.tanh(log_variance)
        kl = ops.exp(log_variance) + ops.square(mean) - log_variance
        z = mean + ops.exp(log_variance / 2) * ops.cast(noise, mean.dtype)
        return self.decoder(z), ops.mean(ops.cast(kl, "float32"))

    def loss_of(self, x, y):
        pixels, kl = self(x, noise=y, training=True)
        off = ops.cast(x, pixels.dtype) - pixels
        error = ops.sqrt(ops.sum(off * off))
        error = ops.cast(error, "float32")
        return error + 0.01 * kl, {"step_loss": error}


def pictures():
    random = np.random.default_rng(0)
    x = random.normal(size=(512, 2)) @ random.normal(size=(2, 512))
    noise = random.normal(size=(512, 4))
    return (2 * x).astype("float32"), noise.astype("float32")


# Devised, of autoencoders: errors summed over pixels overflow before the root.
@case(
    data=pictures,
    culprits=frozenset({"decoder/out"}),
    kind="forward_overflow",
    direction="forward",
    decoy="encoder/out",
    loss=None,
    metric="step_loss",
)
def vae_summed_pixels():
    return Vae()


class CastTargets(OwnStep):
    """Casts what it is to learn to its own compute dtype."""

    def __init__(self):
        super().__init__()
        self.h1 = layers.Dense(32, "relu", name="h1")
        self.head = layers.Dense(1, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.h1(x))

    def loss_of(self, x, y):
        price = ops.cast(ops.cast(y, self.compute_dtype), "float32") / 1e5
        loss = ops.mean(ops.square(price - self(x, training=True)))
        return loss, {"step_loss": loss}


def large_prices():
    x, _ = vectors()()
    return x, (1e5 + 2e4 * x[:, :1]).astype("float32")


# Devised, of regressions: `train_step` casts targets of 1e5 to float16.
@case(
    data=large_prices,
    culprits=frozenset({"<model>"}),
    kind="cast_overflow",
    direction="forward",
    decoy="h1",
    loss=None,
    metric="step_loss",
)
def cast_targets():
    return CastTargets()
