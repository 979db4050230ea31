"""Inputs, ids, positions and streams that float16 rounds or cannot hold."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, photographs, tokens, vectors
from zoo.parts import (
    Own,
    Parts,
    chain,
    classifier,
    dense,
    embedding,
    head,
    normal,
    relu,
    row,
)


@dataset
def with_raw_sample(_):
    x, y = vectors()()
    x[3] *= 1e5
    return x, y


@case(with_raw_sample())
def input_overflow():
    norm, last = (
        layers.LayerNormalization(name="ln"),
        dense(64, "tanh", name="h3"),
    )
    return classifier((32,), relu(64, "h1"), relu(64, "h2"), norm, last)


@dataset
def raw_prices(_):
    x, y = vectors()()
    return 2e5 + 2e4 * x, y


@case(raw_prices())
def raw_prices_tower():
    """Tabular data: raw prices that a nested model is to rescale."""
    units = layers.Rescaling(1 / 2e4, -10, name="units")
    hidden = layers.Dense(64, "relu", name="h1")
    return classifier((32,), keras.Sequential([units, hidden], name="tower"))


@dataset
def table_of_ids(random):
    x = random.integers(4096, 4160, (512, 2))
    a, b = np.split(x.astype("float32"), 2, axis=1)
    return (a, b), x[:, 0] % 4


@case(table_of_ids())
def float_token_ids():
    """Tabular data: ids that arrive as floats are rounded above 2048."""
    inputs = keras.Input((1,)), keras.Input((1,))
    words = embedding(5000, 16, name="embedding")
    parts = words, layers.Flatten(), relu(32, "h1")
    x = row(inputs, layers.Concatenate(name="ids"), *parts)
    return keras.Model(inputs, head(x))


@dataset
def large_ids(random):
    x = random.integers(99000, 99020, (512, 3))
    return x, x[:, 0] % 4


@case(large_ids())
def healthy_large_ids():
    """Like float_token_ids: ids far beyond 65504 are exact as integers."""
    return classifier(
        (3,), embedding(99100, 4), layers.Flatten(), dtype="int32"
    )


@dataset
def days(random):
    day = random.integers(0, 32, (512, 1))
    return 19690.0 + day, day[:, 0] // 8


@case(days())
def days_since_epoch():
    """Time series: days since 1970 are 16 apart in float16."""
    normalize = layers.Normalization(None, 19706.0, 85.0, name="normalize")
    return classifier((1,), normalize, dense(64, "tanh", name="h1"))


@dataset
def years(random):
    x = random.integers(1990, 2030, (512, 1))
    return x * 1.0, (x[:, 0] - 1990) // 10


@case(years())
def healthy_years():
    """Like days_since_epoch: years below 2048 are exact."""
    normalize = layers.Normalization(mean=2010.0, variance=130.0)
    return classifier((1,), normalize, dense(64, "tanh"))


class Nerf(Parts):
    """Sines of a coordinate times powers of two, then a linear head."""

    def call(self, x):
        powers = ops.cast(np.pi * 2.0 ** np.arange(13), x.dtype)
        angles = x * powers
        encoded = ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)
        return self.head(ops.concatenate([encoded, self.h1(encoded)], -1))


@dataset
def coordinates(random):
    x = random.uniform(0.5, 1, (512, 1)).astype("float32")
    return x, np.sin(2**12 * np.pi * x[:, 0]) > 0


@case(coordinates())
def nerf_encoding():
    """Sinusoidal encodings: high frequencies become noise."""
    return Nerf(h1=relu(32), head=dense(2, dtype="float32"))


@dataset
def incomes(random, lowest, highest):
    """Incomes, given as logarithms; their orders tell the class."""
    x = np.exp(random.uniform(lowest, highest, size=(512, 4)))
    return x, np.argmax(x, axis=-1)


def log_of(offset):
    """A classifier of logarithms."""
    log = layers.Lambda(ops.log1p, output_shape=(4,), name="log")
    centre = layers.Rescaling(1.0, offset=offset, name="centre")
    return chain((4,), log, centre, relu(32, "h1"), dense(4, name="head"))


@case(incomes(9.0, 14.0))
def log_of_income():
    """The logarithm is harmless, the cast before it, of a million, is not."""
    return log_of(-12.0)


@case(incomes(7.0, 11.0))
def sound_log_of_income():
    """Incomes of up to 60,000, and their logarithm."""
    return log_of(-9.0)


class DeepCross(Parts):
    """Adds x0 * (x W) + x to a dense tower, on raw features.

    The product is in float32 if the model does not cast `x0`.
    """

    def call(self, x0):
        x = ops.add(ops.multiply(x0, self.cross_1(x0)), x0)
        x = ops.add(ops.multiply(x0, self.cross_2(x)), x)
        x = self.norm(x)
        return self.head(ops.concatenate([x, self.deep(x0) / 30], -1))


@case(vectors(scale=30.0))
def deep_cross():
    """Recommenders: products of raw features overflow at depth two."""
    return DeepCross(
        cross_1=dense(32),
        cross_2=dense(32),
        norm=layers.LayerNormalization,
        deep=relu(64),
        head=dense(4, dtype="float32"),
    )


@case(vectors())
def healthy_deep_cross():
    """Like deep_cross: the same products of features that were normalized."""
    return deep_cross()


@dataset
def first_word(random, samples=256, length=4):
    x = random.integers(0, 4, (samples, length))
    return x, x[:, 0]


class Rotary(Own):
    """Rotates pairs of channels by the position in a long document."""

    def call(self, x):
        half = x.shape[-1] // 2
        steps = ops.cast(ops.arange(x.shape[1]), self.compute_dtype)
        frequency = np.float32(8.0) ** (-np.arange(half) / half)
        frequency = ops.cast(frequency, self.compute_dtype)
        angle = (steps + self.start)[:, None] * frequency
        cos, sin = ops.cos(angle), ops.sin(angle)
        a, b = x[..., :half], x[..., half:]
        return ops.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@case(first_word())
def rotary_far_positions():
    """Positions from 30,000 on; float16 holds every sixteenth one."""
    words = embedding(4, 32, embeddings_initializer="normal", name="words")
    scale = layers.Rescaling(20.0, name="scale")
    rotary = Rotary(start=30000.0, name="rotary")
    mean = layers.GlobalAveragePooling1D(name="mean")
    last = relu(64, "h1")
    return classifier((4,), words, scale, rotary, mean, last, dtype="int32")


@dataset
def noised(random, samples=512):
    """Noisy vectors, and the time that tells how much of them is noise."""
    t = random.integers(0, 1000, (samples, 1))
    share = np.cos(t / 1000.0 * np.pi / 2)
    clean, noise = random.normal(size=(2, samples, 8))
    x = share * clean + np.sqrt(1 - share**2) * noise
    return {"x": x, "t": t * 1.0}, noise


class TimeEmbedding(layers.Layer):
    """Sines and cosines of a time of 0 to 999 in ten frequencies."""

    def call(self, t):
        k = ops.cast(ops.arange(16), self.compute_dtype)
        angle = t * ops.exp(-np.log(10000.0) / 16 * k)
        return ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)


@case(noised())
def healthy_time_embedding():
    """Angles of up to 1000, off by half, and a number of the time still."""
    x, t = keras.Input((8,), name="x"), keras.Input((1,), name="t")
    mlp = dense(32, "silu", name="time_mlp")
    time = row(t, TimeEmbedding(name="time"), mlp)
    h = layers.Add(name="add")([layers.Dense(32, name="h1")(x), time])
    h = layers.Dense(32, "silu", name="h2")(h)
    return keras.Model({"x": x, "t": t}, head(h, 8))


@case(photographs())
def gamma_expansion():
    """255 to the power of 2.2 by a Lambda, in a Sequential."""
    return keras.Sequential(
        [
            layers.Lambda(lambda x: x**2.2 / 255.0**1.2, name="gamma"),
            layers.Rescaling(1 / 255.0, name="scale"),
            layers.Conv2D(16, 3, activation="relu", name="conv"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(4, dtype="float32", name="head"),
        ]
    )


@dataset
def sounds(random):
    y = random.integers(0, 4, 512)
    t = np.arange(32) * 2 * np.pi / 32 + random.uniform(0, 6, (512, 1))
    x = 200 * np.sin(t * (2 + 3 * y[:, None])) + random.normal(size=(512, 32))
    return x, y


class Decibels(layers.Layer):
    """log(x + 1e-6) / 10."""

    def call(self, x):
        return ops.log(x + 1e-6) / 10


class Power(layers.Layer):
    """Energy of the bands of a spectrum."""

    def build(self, input_shape):
        angle = 2 * np.pi * np.outer(np.arange(input_shape[-1]), range(16))
        basis = np.concatenate([np.cos(angle / 32), np.sin(angle / 32)], 1)
        self.basis = basis.astype("float32")

    def call(self, x):
        waves = ops.matmul(x, ops.cast(self.basis, x.dtype))
        real, imaginary = ops.split(waves, 2, axis=-1)
        return ops.square(real) + ops.square(imaginary)


@case(sounds())
def log_spectrogram():
    """Speech front ends: energies overflow, their log would fit."""
    return classifier(
        (32,), Power(name="power"), Decibels(name="decibels"), relu(64, "h1")
    )


@dataset
def frames(random, samples=256):
    """Eight frames of raw 16-bit sound; the loudest tells the class."""
    y = random.integers(0, 8, samples)
    x = random.normal(0, 60.0, size=(samples, 8, 20))
    x[np.arange(samples), y] *= 20.0
    return x, y


class Loudness(layers.Layer):
    """The logarithm of the power of a frame."""

    def call(self, x):
        power = ops.sum(x * x, axis=-1, keepdims=True)
        return ops.log(power + 1.0)


@case(frames())
def loudness_of_frames():
    """Raw sound, in a Sequential in a Sequential in TimeDistributed."""
    data = keras.Input((20,))
    inner = keras.Sequential([data, Loudness(name="loudness")], name="inner")
    data, scale = keras.Input((20,)), layers.Dense(4, name="scale")
    frame = keras.Sequential([data, inner, scale], name="frame")
    each = layers.TimeDistributed(frame, name="frames")
    flat = layers.Flatten(name="flat")
    return chain((8, 20), each, flat, dense(8, name="head"))


@case(vectors(scale=30.0))
def three_factors():
    """A product of three branches, too large until it is scaled."""
    inputs = keras.Input((32,))
    x = layers.Multiply(name="product")(
        [layers.Dense(32, name=n)(inputs) for n in "abc"]
    )
    x = layers.Rescaling(1e-5, name="scale")(x)
    skip = layers.LayerNormalization(name="skip")(inputs)
    x = layers.Concatenate(name="join")([x, skip])
    return keras.Model(inputs, head(layers.Dense(64, "relu", name="h1")(x)))


@case(vectors(scale=50.0))
def healthy_large_stream():
    """Like residual_operations: a stream of 1e4 between norms."""
    inputs = x = keras.Input((32,))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = x + 200.0 * layers.Dense(32, "relu")(y)
    return keras.Model(inputs, head(layers.LayerNormalization()(x)))


@case(vectors())
def residual_operations():
    """Deep residual stacks without a norm: the stream grows eightfold."""
    inputs = x = keras.Input((32,))
    for index in range(1, 6):
        x = x + 8.0 * layers.Dense(32, name=f"block_{index}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, head(x))


@dataset
def skewed(_):
    x, y = vectors(features=8, scale=0.4)()
    return np.exp(x), y


def box_cox(x):
    return (x**0.001 - 1.0) / 0.001


@case(skewed())
def box_cox_small_power():
    """The power 0.001 is 1 but for the fourth digit, which is scaled up."""
    power = layers.Lambda(box_cox, output_shape=(8,), name="box_cox")
    return classifier((8,), power, layers.Dense(32, "relu", name="h1"))


@dataset
def first_tokens(_):
    x, _ = tokens()()
    return x, x[:, 0]


class TiedHead(Own):
    """Logits from the matrix of an embedding, scaled down afterwards."""

    def call(self, x):
        matrix = ops.cast(self.embedding.embeddings, self.compute_dtype)
        return ops.matmul(x, ops.transpose(matrix)) / 16.0**2


@case(first_tokens())
def tied_embedding():
    first = embedding(20, 256, normal(64.0), name="embedding")()
    tied = TiedHead(embedding=first, name="tied")
    parts = first, layers.Flatten(), dense(256, name="mix"), tied
    return chain((12,), *parts, dtype="int32")


class Block(Own):
    """A residual block without a norm."""

    def call(self, x):
        return x + self.dense(x)


@case(vectors())
def tied_blocks():
    """One block, applied 16 times; its numbers grow each time."""
    embed = layers.Dense(32, "relu", name="embed")
    block = Block("block", dense=layers.Dense(32, "relu", name="dense"))
    norm = layers.LayerNormalization(name="norm")
    return classifier((32,), embed, *[block] * 16, norm)
