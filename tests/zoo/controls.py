"""Healthy models, and faults that no precision cures: nothing to demote."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors


def head(x, units=4):
    return layers.Dense(units, dtype="float32", name="head")(x)


@case(data=vectors())
def healthy_mlp():
    inputs = x = keras.Input((32,))
    for _ in range(2):
        x = layers.Dense(64, "relu")(x)
    return keras.Model(inputs, head(x))


@case(data=vectors(), kind="scale_search", initial_scale=2.0**24)
def initial_scale_too_high():
    return healthy_mlp()


@case(data=vectors())
def healthy_deep_mlp():
    inputs = x = keras.Input((32,))
    for _ in range(20):
        x = layers.Dense(32, "relu", kernel_initializer="he_normal")(x)
    return keras.Model(inputs, head(x))


def images(samples=128):
    def data():
        random = np.random.default_rng(0)
        y = random.integers(0, 4, samples).astype("int32")
        x = random.normal(size=(samples, 8, 8, 3)) + y[:, None, None, None]
        return x.astype("float32"), y

    return data


@case(data=images())
def healthy_cnn():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(16, 3, activation="relu")(x)
    return keras.Model(inputs, head(layers.GlobalAveragePooling2D()(x)))


@case(data=images())
def healthy_resnet():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.GroupNormalization(4)(x)
        y = layers.Conv2D(16, 3, padding="same", activation="relu")(y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
    return keras.Model(inputs, head(layers.GlobalAveragePooling2D()(x)))


def tokens(samples=128, length=12, vocabulary=20):
    def data():
        random = np.random.default_rng(0)
        x = random.integers(0, vocabulary, (samples, length)).astype("int32")
        return x, (x[:, 0] % 4).astype("int32")

    return data


@case(data=tokens(), optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_recurrent():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(inputs)
    x = layers.LSTM(16, return_sequences=True, dropout=0.1)(x)
    return keras.Model(inputs, head(layers.GRU(16)(x)))


def attend(projected):
    """Scaled attention of one head to query, key and value side by side."""
    query, key, value = ops.split(projected, 3, axis=-1)
    scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
    return ops.matmul(ops.softmax(scores * key.shape[-1] ** -0.5), value)


class SelfAttention(layers.Layer):
    """Scaled attention of one head, which JAX runs in float16 on a CPU."""

    def build(self, input_shape):
        self.projection = layers.Dense(3 * input_shape[-1])
        self.projection.build(input_shape)

    def call(self, inputs):
        return attend(self.projection(inputs))


@case(data=tokens())
def healthy_transformer():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs)
    x = layers.Add()([x, SelfAttention()(layers.LayerNormalization()(x))])
    y = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(16)(y)])
    return keras.Model(inputs, head(layers.GlobalAveragePooling1D()(x)))


def reconstruction():
    x, _ = vectors()()
    return x, x


@case(
    data=reconstruction,
    loss="mse",
    metric="loss",
    optimizer=lambda: keras.optimizers.SGD(0.1),
)
def healthy_autoencoder():
    inputs = keras.Input((32,))
    x = layers.Dense(16, "tanh")(inputs)
    return keras.Model(inputs, layers.Dense(32, dtype="float32")(x))


def with_nan():
    x, y = vectors()()
    x[3, 5] = np.nan
    return x, y


@case(data=with_nan, kind="bad_data")
def nan_data():
    return healthy_mlp()


@case(
    data=vectors(scale=100.0),
    optimizer=lambda: keras.optimizers.SGD(1e4),
    kind="scale_search",
)
def learning_rate_too_high():
    return healthy_mlp()
