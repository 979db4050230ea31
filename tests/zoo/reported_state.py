"""Layers that keep statistics of their own, as public reports have them."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.faults import before_mlp


class Centered(layers.Layer):
    """x less a running mean, in units of 70, clipped to two of them."""

    def build(self, input_shape):
        self.mean = self.add_weight(
            shape=input_shape[-1:],
            initializer=keras.initializers.Constant(14656.0),
            trainable=False,
        )

    def call(self, x, training=False):
        z = ops.clip((x - self.mean) / 70.0, -2.0, 2.0)
        if training:
            step = 0.01 * (ops.mean(x, axis=0) - self.mean)
            self.mean.assign(self.mean + step)
        return z


def eights():
    """Multiples of 8, which float16 has as they are, about 15000."""
    x, y = vectors(scale=35.0, mean=15000.0)()
    return 8 * np.round(x / 8), y


@case(
    data=eights,
    culprits=frozenset({"centered"}),
    kind="precision_loss",
    direction="update",
    decoy="h1",
    epochs=40,
)
def running_mean():
    """Reported of moving averages: 14656 + 3.4 is 14656 in float16."""
    return before_mlp(Centered(name="centered"))


class Delay(layers.Layer):
    """Lets nothing through in its first 2080 steps, 2040 of them done."""

    def build(self, input_shape):
        self.steps = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(2040.0),
            trainable=False,
        )

    def call(self, x, training=False):
        if training:
            self.steps.assign(self.steps + 1)
        return x * ops.cast(self.steps > 2080, x.dtype)


@case(
    data=vectors(),
    culprits=frozenset({"delay"}),
    kind="precision_loss",
    direction="update",
    decoy="h1",
    warm_up=1,
)
def step_counter():
    """Reported of layers with a delay: 2048 + 1 is 2048 in float16."""
    return before_mlp(Delay(name="delay"))


class StreamingNorm(layers.Layer):
    """Welford's mean and sum of squares, with a million samples behind it."""

    def build(self, input_shape):
        def weight(value, shape=input_shape[-1:]):
            constant = keras.initializers.Constant(value)
            return self.add_weight(
                shape=shape, initializer=constant, trainable=False
            )

        self.count = weight(1e6, ())
        self.mean, self.squares = weight(0.0), weight(1e6)

    def call(self, x, training=False):
        if training:
            new = ops.cast(ops.shape(x)[0], x.dtype)
            delta = ops.mean(x, axis=0) - self.mean
            squares = ops.sum(ops.square(x - self.mean), axis=0)
            self.count.assign(self.count + new)
            self.mean.assign(self.mean + delta * new / self.count)
            self.squares.assign(self.squares + squares)
        variance = self.squares / self.count
        return (x - self.mean) / ops.sqrt(variance + 1e-3)


@case(
    data=vectors(),
    culprits=frozenset({"streaming"}),
    kind="weight_overflow",
    direction="forward",
    decoy="h1",
)
def streaming_statistics():
    """Reported of normalizers that count samples, resumed from a checkpoint."""
    return before_mlp(StreamingNorm(name="streaming"))
