"""Data that models of several subjects are trained on."""

import functools

import keras
import numpy as np


def dataset(function=None, seed=0):
    """Turns a function of a random generator into one for `Case.data`.

    The new function takes the other arguments, and returns a function that
    returns arrays of float32 and int32.
    """
    if function is None:
        return functools.partial(dataset, seed=seed)

    @functools.wraps(function)
    def make(*arguments, **keywords):
        def data():
            random = np.random.default_rng(seed)
            arrays = function(random, *arguments, **keywords)
            return keras.tree.map_structure(_in_32_bits, arrays)

        return data

    return make


def _in_32_bits(array):
    return array.astype("float32" if array.dtype.kind == "f" else "int32")


@dataset
def vectors(random, samples=512, features=32, classes=4, scale=1.0, mean=0.0):
    """Gaussian data whose classes a linear model learns."""
    x = random.normal(size=(samples, features)).astype("float32")
    teacher = random.normal(size=(features, classes))
    y = np.argmax(x @ teacher, axis=-1)
    return x * np.float32(scale) + np.float32(mean), y


@dataset(seed=1)
def targets(random, samples=512, features=32, of=lambda z: z):
    """The same data, and a function of their sum with random weights."""
    x, _ = vectors(samples, features)()
    return x, of(x @ random.normal(size=(features, 1)))


@dataset
def images(random, samples=128):
    y = random.integers(0, 4, samples)
    x = random.normal(size=(samples, 8, 8, 3)) + y[:, None, None, None]
    return x, y


@dataset
def tokens(random, samples=128, length=12, vocabulary=20):
    x = random.integers(0, vocabulary, (samples, length))
    return x, x[:, 0] % 4


@dataset
def sequences(random, samples=128, length=100, largest=2000.0):
    x = random.uniform(0, largest, (samples, length, 1)).astype("float32")
    return x, x.mean(axis=1) / largest


@dataset
def texts(random, samples=128, length=32):
    y = random.integers(0, 4, samples)
    x = random.normal(size=(samples, length, 8))
    x[:, :3, :4] += 2.0 * np.eye(4)[y][:, None]
    return x, y


@dataset
def photographs(random, samples=128, size=8):
    """Pixels of 0 to 255, each class with a colour of its own."""
    y = random.integers(0, 4, samples)
    tint = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])[y]
    x = random.uniform(60, 190, size=(samples, size, size, 3))
    x = x + 60.0 * tint[:, None, None]
    return x, y


def many_rows(scale):
    """Targets of 2,048 rows that are as large as the scale."""
    return targets(2048, 16, lambda z: scale * np.tanh(z))
