"""Layers that overflow in float16, at a known place."""

from keras import layers, ops


class Overflowing(layers.Layer):
    def call(self, x):
        return ops.sqrt(ops.square(x * 1000.0)) / 1000.0


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.bad = Overflowing(name="bad")
        self.drop = layers.Dropout(0.5)

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x, training=None):
        return x + self.drop(self.bad(self.dense(x)), training=training)
