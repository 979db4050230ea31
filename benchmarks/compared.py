r"""Two trainings for `keras-mixprec compare`, as docs/comparison.md shows them.

keras-mixprec compare benchmarks.compared:digits benchmarks.compared:images \
    --validation-data benchmarks.compared:test_images --metric accuracy

keras-mixprec compare benchmarks.compared:transformer \
    benchmarks.compared:rows --metric accuracy \
    --validation-data benchmarks.compared:test_rows
"""

import keras
from keras import layers
from sklearn.datasets import load_digits

from benchmarks.models import SelfAttention


def digits():
    """Returns a small convolutional network."""
    return _compiled(
        keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", activation="relu"),
                layers.BatchNormalization(momentum=0.9),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
    )


def transformer():
    """Returns a model of two blocks that read an image row by row."""
    inputs = keras.Input((8, 8))
    x = layers.Dense(64)(inputs)
    for _ in range(2):
        x = layers.Add()([x, SelfAttention()(layers.LayerNormalization()(x))])
        y = layers.Dense(128, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return _compiled(keras.Model(inputs, outputs))


def images():
    return _digits(slice(1437))


def test_images():
    return _digits(slice(1437, None))


def _digits(rows):
    found = load_digits()
    x = (found.images[..., None] / 16.0).astype("float32")
    return x[rows], found.target[rows]


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
