"""The models that `monitor_overhead.py` and `steady_cost.py` train."""

import keras
import numpy as np
from keras import layers, ops

import keras_mixprec

BATCH = 64


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


def compiled(name: str, jit_compile: bool, steps: int) -> tuple:
    """Returns a mixed_float16 model, compiled, and as many batches of x and y.

    Args:
        name: String, one of `MODELS`.
        jit_compile: Boolean, as in `compile`.
        steps: Int. Batches of `BATCH` samples.
    """
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model, shape = MODELS[name]()
    model.compile(
        keras_mixprec.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(steps * BATCH, *shape)).astype("float32")
    return model, x, random.integers(0, 10, size=len(x))
