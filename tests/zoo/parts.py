"""Parts that models of several subjects are made of."""

from functools import partial

import keras
from keras import layers, ops

constant = keras.initializers.Constant


def normal(std):
    return keras.initializers.RandomNormal(stddev=std, seed=1)


def later(layer):
    """Returns a function of the layer's arguments that makes it when called.

    A layer draws the seeds of its weights as it is made: so they are drawn in
    the order of the layers in a model.
    """
    return partial(partial, layer)


dense, conv = later(layers.Dense), later(layers.Conv2D)
embedding = later(layers.Embedding)


def relu(units, name=None, **arguments):
    return dense(units, "relu", name=name, **arguments)


def head(x, units=4):
    return layers.Dense(units, dtype="float32", name="head")(x)


def row(x, *parts):
    """Calls one part after the other, and returns what the last one does."""
    for part in parts:
        x = (part if isinstance(part, layers.Layer) else part())(x)
    return x


def plus(*parts, name=None):
    """A part that adds to what it is given what parts in a row make of it."""

    def added(x):
        return layers.Add(name=name)([x, row(x, *parts)])

    return lambda: added


def chain(shape, *parts, dtype=None, kind=keras.Model):
    """Returns a model of parts in a row: layers, or what makes them."""
    inputs = keras.Input(shape, dtype=dtype)
    return kind(inputs, row(inputs, *parts))


def classifier(shape, *parts, units=4, **arguments):
    """The same with a head in float32."""
    last = dense(units, dtype="float32", name="head")
    return chain(shape, *parts, last, **arguments)


def before_mlp(layer, units=64):
    """Returns a classifier of vectors that the layer looks at first."""
    return classifier((32,), layer, layers.Dense(units, "relu", name="h1"))


def behind_dense(*parts, hidden=None):
    """Returns a classifier of vectors with parts between two dense layers."""
    first = hidden or dense(64, name="h1")
    return classifier((32,), first, *parts, relu(32, "h2"))


class Own(layers.Layer):
    """A layer that stores its arguments by name.

    From a `seed` it makes a generator of random numbers, `seeds`.
    """

    def __init__(self, name=None, seed=None, **own):
        super().__init__(name=name)
        for key, value in own.items():
            setattr(self, key, value)
        if seed is not None:
            self.seeds = keras.random.SeedGenerator(seed)

    def normal(self, x):
        """Numbers of a normal distribution, of the shape and dtype of `x`."""
        return keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seeds)


class Parts(keras.Model):
    """A subclassed model of layers that are named as they are given."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part(name=name))


def float32_loss(value, weight=1.0):
    """A loss to be added: TensorFlow adds no float16 ones to float32 ones."""
    return ops.cast(value, "float32") * weight
