"""The models that `monitor_overhead.py` trains."""

import keras
from keras import layers, ops


def convolutional() -> tuple:
    """Returns a small image classifier and the shape of its input."""
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, dtype="float32"),
        ]
    )
    return model, (16, 16, 3)


def many_small_layers() -> tuple:
    """Returns a classifier of 40 Dense(64) and the shape of its input."""
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(40):
        model.add(layers.Dense(64, "relu", True, "he_normal"))
    model.add(layers.Dense(10, dtype="float32"))
    return model, (64,)


def transformer() -> tuple:
    """Returns a classifier of two blocks and the shape of its input."""
    inputs = x = keras.Input((16, 64))
    for _ in range(2):
        x = layers.Add()([x, SelfAttention()(layers.LayerNormalization()(x))])
        y = layers.Dense(128, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    outputs = layers.GlobalAveragePooling1D()(x)
    outputs = layers.Dense(10, dtype="float32")(outputs)
    return keras.Model(inputs, outputs), (16, 64)


class SelfAttention(layers.Layer):
    """Attention of one head.

    Not `keras.layers.MultiHeadAttention`, whose float16 `einsum` JAX does not
    run on a CPU.
    """

    def build(self, input_shape):
        width = input_shape[-1]
        self.projection = layers.Dense(3 * width)
        self.projection.build(input_shape)
        self.output_projection = layers.Dense(width)
        self.output_projection.build(input_shape)

    def call(self, inputs):
        query, key, value = ops.split(self.projection(inputs), 3, axis=-1)
        scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
        weights = ops.softmax(scores * key.shape[-1] ** -0.5)
        return self.output_projection(ops.matmul(weights, value))


MODELS = {
    "convolutional": convolutional,
    "40 Dense(64)": many_small_layers,
    "transformer": transformer,
}
