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


def masks(samples=128, size=48):
    """Images and where they are bright, which is nearly everywhere."""
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, size, size, 1)) + 1.3
    return x.astype("float32"), (x > 0).astype("float32")


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
