"""Layers that keep statistics of their own, as public reports have them."""

import keras
from keras import layers, ops

from zoo.case import case, vectors
from zoo.faults import before_mlp


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
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def streaming_statistics():
    """Reported of normalizers that count samples, resumed from a checkpoint."""
    return before_mlp(StreamingNorm(name="streaming"))
