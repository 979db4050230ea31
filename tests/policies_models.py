"""Models with composites, wrappers and user-written blocks, for the tests."""

import keras
import numpy as np
from keras import layers

INPUT = np.linspace(-1, 1, 40, dtype="float32").reshape(2, 5, 4)


@keras.saving.register_keras_serializable("policies_models")
class Block(layers.Layer):
    """A block whose sublayers are made in `__init__`, as most are."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((*shape[:-1], 4))

    def call(self, x):
        return self.norm(self.dense(x))


@keras.saving.register_keras_serializable("policies_models")
class LateBlock(layers.Layer):
    """A block that makes sublayers in `build`."""

    def build(self, shape):
        self.dense = layers.Dense(4)
        self.block = Block()
        self.dense.build(shape)
        self.block.build((*shape[:-1], 4))

    def call(self, x):
        return self.block(self.dense(x))


@keras.saving.register_keras_serializable("policies_models")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.1)
        self.blocks = [Block(), {"late": LateBlock()}]
        self.head = layers.Dense(2, activation="softmax")
        self.head_again = self.head

    def call(self, x):
        x = self.attention(x, x)
        return self.head(self.blocks[1]["late"](self.blocks[0](x)))


def recurrent():
    """Returns a Sequential of recurrent layers, wrappers and a nested one."""
    cells = [layers.LSTMCell(3), layers.GRUCell(4)]
    return keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(4)),
            layers.RNN(cells, return_sequences=True),
            layers.SpectralNormalization(layers.Dense(4)),
            keras.Sequential([Block(), layers.Dense(4)]),
            layers.Dense(2),
        ]
    )


def functional():
    """Returns a Functional model with attention, a shared and a nested one."""
    inputs = keras.Input((5, 4))
    x = layers.MultiHeadAttention(2, 3, dropout=0.1)(inputs, inputs) + inputs
    shared = layers.Dense(4)
    x = shared(shared(x))
    inner = keras.Input((5, 4))
    nested = keras.Model(inner, Block()(layers.Dense(4)(inner)))
    return keras.Model(
        inputs, layers.Softmax()(layers.Dense(3, name="logits")(nested(x)))
    )


def subclassed():
    """Returns a built subclassed model."""
    model = Subclassed()
    model(INPUT)
    return model


BUILDERS = [recurrent, functional, subclassed]
