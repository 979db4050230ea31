r"""Two trainings for `keras-mixprec compare`, which docs/comparison.md shows.

keras-mixprec compare benchmarks.compared:digits benchmarks.compared:images \
    --validation-data benchmarks.compared:test_images --metric accuracy

keras-mixprec compare benchmarks.compared:transformer \
    benchmarks.compared:rows --metric accuracy \
    --validation-data benchmarks.compared:test_rows
"""

import keras
from keras import layers

from benchmarks.models import SelfAttention
from keras_mixprec.cli.demo import build_model, load_images


def digits():
    """The convolutional network of the demo."""
    return _compiled(build_model())


def transformer():
    """Two blocks that read an image row by row."""
    inputs = keras.Input((8, 8))
    x = layers.Dense(64)(inputs)
    for _ in range(2):
        x = layers.Add()([x, SelfAttention()(layers.LayerNormalization()(x))])
        y = layers.Dense(128, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return _compiled(keras.Model(inputs, outputs))


def images():
    return load_images()[0]


def test_images():
    return load_images()[1]


def rows():
    x, y = images()
    return x[..., 0], y


def test_rows():
    x, y = test_images()
    return x[..., 0], y


def _compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model
