"""Models for the benchmarks, small and large."""

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


def resnet50(pixels: int, classes: int) -> keras.Model:
    """Returns Keras' ResNet50, with random weights."""
    return keras.applications.ResNet50(
        weights=None, input_shape=(pixels, pixels, 3), classes=classes
    )


def token_transformer(
    blocks: int,
    tokens: int,
    width: int,
    vocabulary: int,
    classes: int,
    heads: int = 1,
) -> keras.Model:
    """Returns a classifier of sentences."""
    inputs = keras.Input((tokens,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = SelfAttention()(y) if heads == 1 else _many_heads(y, heads)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    outputs = layers.Dense(classes, "softmax", dtype="float32")(x)
    return keras.Model(inputs, outputs)


def _many_heads(x, heads):
    return layers.MultiHeadAttention(heads, x.shape[-1] // heads)(x, x)


def unet(pixels: int, widths: tuple, classes: int) -> keras.Model:
    """Returns a U-Net that classifies every pixel, a level for each width."""
    inputs = x = keras.Input((pixels, pixels, 3))
    skipped = []
    *above, lowest = widths
    for width in above:
        x = _two_convolutions(x, width)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = _two_convolutions(x, lowest)
    for width in reversed(above):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = layers.Concatenate()([skipped.pop(), x])
        x = _two_convolutions(x, width)
    outputs = layers.Conv2D(classes, 1, activation="softmax", dtype="float32")
    return keras.Model(inputs, outputs(x))


def _two_convolutions(x, width):
    for _ in range(2):
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x


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


def resnet50_of_64_pixels() -> tuple:
    """Returns a ResNet50 without its softmax, and the shape of its input."""
    model = resnet50(64, 10)
    logits = layers.Dense(10, dtype="float32")(model.layers[-2].output)
    return keras.Model(model.input, logits), (64, 64, 3)


def tiny() -> tuple:
    """Returns a classifier that compiles soon, and the shape of its input."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(10)]), (4,)


MODELS = {
    "tiny": tiny,
    "convolutional": convolutional,
    "40 Dense(64)": many_small_layers,
    "transformer": transformer,
    "resnet50": resnet50_of_64_pixels,
}


def compiled(name: str, jit_compile: bool, steps: int) -> tuple:
    """Returns a compiled mixed_float16 model, and `x` and `y` for some steps.

    Args:
        name: String, one of `MODELS`.
        jit_compile: Boolean, as in `compile`.
        steps: Int. The number of batches, of `BATCH` samples each.
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
