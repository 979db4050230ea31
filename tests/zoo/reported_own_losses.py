"""Models that override `compute_loss`, as public reports have them.

Their loss has the dtype of the layer that puts out what it is of.
"""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.faults import normal


class OwnLoss(keras.Model):
    """A model whose `compute_loss` is a function of targets and outputs."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = self.own_loss(ops.cast(y, y_pred.dtype), y_pred)
        return ops.cast(loss, "float32")


class Contrastive(OwnLoss):
    def own_loss(self, y, y_pred):
        left, right = ops.split(y_pred, 2, axis=-1)
        similar = ops.exp(ops.matmul(left, ops.transpose(right)) / 0.05)
        right_one = ops.sum(similar * ops.eye(32, dtype=similar.dtype), axis=-1)
        return ops.mean(ops.log(ops.sum(similar, axis=-1)) - ops.log(right_one))


def views():
    random = np.random.default_rng(0)
    a = random.normal(size=(512, 16))
    b = a + 0.3 * random.normal(size=a.shape)
    return (a.astype("float32"), b.astype("float32")), np.zeros(512, "float32")


@case(
    data=views,
    culprits=frozenset({"pair"}),
    kind="forward_overflow",
    direction="forward",
    decoy="left",
    metric="loss",
)
def contrastive_temperature():
    """Reported of InfoNCE: exp(1 / 0.05), outside of every layer."""
    left, right = keras.Input((16,)), keras.Input((16,))
    a = layers.Dense(16, name="left")(left)
    b = layers.Dense(16, name="right")(right)
    a = layers.UnitNormalization(name="unit_left", dtype="float32")(a)
    b = layers.UnitNormalization(name="unit_right", dtype="float32")(b)
    return Contrastive([left, right], layers.Concatenate(name="pair")([a, b]))


class MixtureDensity(OwnLoss):
    def own_loss(self, y, y_pred):
        weight, mean, log_std = ops.split(y_pred, 3, axis=-1)
        z = (y - mean) * ops.exp(-log_std)
        density = ops.exp(-0.5 * ops.square(z) - log_std)
        total = ops.sum(ops.softmax(weight) * density, axis=-1)
        return -ops.mean(ops.log(total + 1e-10))


def spread_targets():
    x, _ = vectors()()
    random = np.random.default_rng(1)
    return x, (x @ random.normal(size=(32, 1))).astype("float32")


def with_outliers():
    x, y = spread_targets()
    y[::16] += 100
    return x, y


@case(
    data=with_outliers,
    culprits=frozenset({"mixture"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
    metric="loss",
    epochs=20,
)
def mixture_density():
    """Reported of mixture density networks: log(exp(-18) + 1e-10)."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    return MixtureDensity(inputs, layers.Dense(12, name="mixture")(x))


class LogCosh(OwnLoss):
    def own_loss(self, y, y_pred):
        return ops.mean(ops.log(ops.cosh(y - y_pred)))


def far_targets():
    x, y = spread_targets()
    return x, y + 20


@case(
    data=far_targets,
    culprits=frozenset({"price"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    metric="loss",
    epochs=40,
    optimizer=lambda: keras.optimizers.Adam(0.005),
)
def log_cosh():
    """Reported of robust regression: cosh(12) overflows, its log is 11."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    return LogCosh(inputs, layers.Dense(1, name="price")(x))


class Dice(OwnLoss):
    def own_loss(self, y, y_pred):
        both = ops.sum(y * y_pred)
        return 1 - 2 * both / (ops.sum(y) + ops.sum(y_pred) + 1)


def masks(samples=128, size=48):
    """Images and where they are bright, which is nearly everywhere."""
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, size, size, 1)) + 1.3
    return x.astype("float32"), (x > 0).astype("float32")


@case(
    data=masks,
    culprits=frozenset({"mask"}),
    # TensorFlow sums the gradient of its kernel over 147,456 pixels in float16:
    # 54% off one in float64, which Adam bears and SGD does not.
    tolerated=frozenset({"conv"}),
    kind="forward_overflow",
    direction="forward",
    decoy="conv",
    metric="loss",
    batch_size=64,
    samples=64,
    optimizer=lambda: keras.optimizers.Adam(0.02),
)
def dice_over_batch():
    """Reported of segmentation: 64 masks of 48 x 48 have too many pixels."""
    inputs = keras.Input((48, 48, 1))
    x = layers.Conv2D(4, 1, activation="tanh", name="conv")(inputs)
    return Dice(
        inputs, layers.Conv2D(1, 1, activation="sigmoid", name="mask")(x)
    )


class FocalProbabilities(OwnLoss):
    def own_loss(self, y, y_pred):
        right = ops.sum(y * y_pred, axis=-1)
        focus = ops.square(1 - right)
        return -ops.mean(focus * ops.log(right + 1e-9))


def wrong_labels():
    """Every 16th is far out and labelled wrong, and a float32 run bears it."""
    x, y = vectors()()
    x[::16] *= 5
    y[::16] = (y[::16] + 1) % 4
    return x, np.eye(4, dtype="float32")[y]


@case(
    data=wrong_labels,
    culprits=frozenset({"probabilities"}),
    kind="underflow",
    direction="forward",
    decoy="logits",
)
def focal_probabilities():
    """Reported of focal losses of probabilities: log(0 + 1e-9) is infinite."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Dense(4, kernel_initializer=normal(1.0), name="logits")(x)
    return FocalProbabilities(inputs, layers.Softmax(name="probabilities")(x))
