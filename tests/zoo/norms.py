"""Normalizations, of what and by what, and statistics that layers keep."""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, images, photographs, vectors
from zoo.parts import (
    Own,
    Parts,
    before_mlp,
    behind_dense,
    chain,
    classifier,
    constant,
    conv,
    dense,
    head,
    normal,
    relu,
    row,
)


class NaiveRMSNorm(layers.Layer):
    """x / sqrt(mean(x*x) + eps), with the sum taken first."""

    def call(self, x):
        mean = ops.sum(x * x, -1, keepdims=True) / x.shape[-1]
        return x / ops.sqrt(mean + 1e-6)


@case(vectors(scale=400.0))
def rms_overflow():
    return before_mlp(NaiveRMSNorm(name="naive_rms"))


class NaiveBatchNorm(layers.Layer):
    """E[x^2] - E[x]^2 over the batch."""

    def call(self, x):
        count = ops.cast(ops.shape(x)[0], x.dtype)
        mean = ops.sum(x, 0) / count
        variance = ops.sum(x * x, 0) / count - mean * mean
        return (x - mean) / ops.sqrt(variance + 1e-3)


@case(vectors(mean=200.0))
def bn_variance_200():
    return before_mlp(NaiveBatchNorm(name="naive_bn"))


@case(vectors(mean=30.0))
def bn_variance_30():
    return bn_variance_200()


@dataset
def with_zero_rows(_):
    x, y = vectors()()
    x[::16] = 0.0
    return x, y


class NaiveLayerNorm(layers.Layer):
    """Layer normalization with BERT's epsilon."""

    def call(self, x):
        mean = ops.mean(x, -1, keepdims=True)
        variance = ops.mean(ops.square(x - mean), -1, keepdims=True)
        return (x - mean) * ops.rsqrt(variance + 1e-12)


@case(with_zero_rows())
def ln_eps():
    return before_mlp(NaiveLayerNorm(name="naive_ln"))


@case(vectors(scale=0.0001))
def unit_norm_builtin():
    return before_mlp(layers.UnitNormalization(name="unit_norm"))


class ModulatedDense(Own):
    """A kernel scaled by a style, then divided by the root of its squares."""

    def build(self, input_shape):
        self.style.build(input_shape)
        self.kernel = self.add_weight((input_shape[-1], 32), normal(1.0))

    def call(self, x):
        kernel = self.style(x)[:, :, None] * self.kernel
        squares = ops.sum(ops.square(kernel), axis=1, keepdims=True)
        kernel = kernel * ops.rsqrt(squares + 1e-8)
        return ops.squeeze(ops.matmul(x[:, None], kernel), 1)


@case(vectors())
def weight_demodulation():
    """Style-based generators: 1/sqrt(inf) is 0, in silence."""
    style = layers.Dense(32, bias_initializer=constant(200.0))
    return before_mlp(ModulatedDense("modulated", style=style))


@dataset
def patterns(random, samples=128):
    y = random.integers(0, 4, samples)
    x = random.normal(size=(samples, 8, 8, 3))
    colours = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, 0]])
    return x + colours[y][:, None, None], y


class StandardizedConv(layers.Layer):
    """A convolution whose kernel is standardized for each filter."""

    def build(self, input_shape):
        start = keras.initializers.RandomNormal(stddev=1e-4)
        self.kernel = self.add_weight((3, 3, input_shape[-1], 16), start)

    def call(self, x):
        mean = ops.mean(self.kernel, axis=(0, 1, 2), keepdims=True)
        centred = self.kernel - mean
        variance = ops.mean(ops.square(centred), axis=(0, 1, 2), keepdims=True)
        kernel = centred / ops.sqrt(variance + 1e-10)
        return ops.conv(x, 0.2 * kernel, padding="same")


@case(patterns())
def weight_standardization():
    """Weights of 1e-4, whose variance is 0 in float16, and so is 1e-10."""
    conv, act = StandardizedConv(name="conv"), layers.ReLU(name="act")
    pool = layers.GlobalMaxPooling2D(name="pool")
    gain = layers.Rescaling(300.0, name="gain")
    return classifier((8, 8, 3), conv, act, pool, gain, relu(64, "h1"))


class GlobalResponse(layers.Layer):
    """Weighs channels by their norm over the picture, over the mean."""

    pool = staticmethod(ops.sum)

    def call(self, x):
        squares = self.pool(ops.square(x), axis=(1, 2), keepdims=True)
        norm = ops.sqrt(squares + 1e-6)
        weight = norm / (ops.mean(norm, axis=-1, keepdims=True) + 1e-6)
        return x * weight + x


def encoded_twice(*parts):
    """Adds up what one encoder says of pictures, turned and not."""
    named = partial(keras.Model, name="encoder")
    encoder = chain((8, 8, 3), *parts, kind=named)
    inputs = keras.Input((8, 8, 3))
    flipped = layers.Permute((2, 1, 3), name="flip")(inputs)
    x = layers.Add(name="both")([encoder(inputs), encoder(flipped)])
    return keras.Model(inputs, head(x))


@case(photographs())
def global_response_norm():
    """Norms over 36 places of raw pixels: inf / inf; one encoder, twice."""
    return encoded_twice(
        conv(16, 3, activation="relu", name="conv"),
        GlobalResponse(name="response"),
        layers.GlobalAveragePooling2D(name="pool"),
        layers.LayerNormalization(name="norm"),
    )


class MeanResponse(GlobalResponse):
    """Weighs channels by their root mean square relative to all channels."""

    pool = staticmethod(ops.mean)


@case(photographs())
def healthy_response_norm():
    """Pixels are scaled first, and squares are averaged."""
    return encoded_twice(
        layers.Rescaling(1 / 127.5, offset=-1.0, name="scale"),
        conv(16, 3, activation="relu", name="conv"),
        MeanResponse(name="response"),
        layers.GlobalAveragePooling2D(name="pool"),
    )


class MinMax(layers.Layer):
    """Scales each channel of each image to 0 to 1."""

    def call(self, x):
        low = ops.min(x, axis=(1, 2), keepdims=True)
        high = ops.max(x, axis=(1, 2), keepdims=True)
        return (x - low) / (high - low + 1e-8)


class Thermal(Parts):
    def call(self, x):
        return self.head(self.flat(self.conv(self.minmax(x))))


def thermal():
    return Thermal(
        minmax=MinMax,
        conv=conv(16, 3, activation="relu"),
        flat=layers.Flatten,
        head=dense(4, dtype="float32"),
    )


@dataset(seed=1)
def with_dead_channel(random):
    x, y = patterns()()
    dead = random.uniform(size=len(x)) < 0.3
    x[dead, :, :, 2] = 0.0
    x[:, 4:, :, 0] += 2.0 * (y[:, None, None] == 1)
    return x, y


@case(with_dead_channel())
def min_max_dead_channel():
    """A channel of zeros is divided by 1e-8, which is 0 in float16."""
    return thermal()


@dataset
def with_corner(_):
    x, y = patterns()()
    x[:, 4:, :, 0] += 2.0 * (y[:, None, None] == 1)
    x[:, :4, :, 1] += 2.0 * (y[:, None, None] == 2)
    return x, y


@case(with_corner())
def healthy_min_max():
    """No channel is the same everywhere, and 1e-8 is not needed."""
    return thermal()


class Mish(layers.Layer):
    """x tanh(log(1 + exp(x))), written as in the paper."""

    def call(self, x):
        return x * ops.tanh(ops.log(1.0 + ops.exp(x)))


@case(with_dead_channel())
def two_faults():
    """A division by 0 at first, and a slope that is NaN behind it."""
    return classifier(
        (8, 8, 3),
        MinMax(name="minmax"),
        conv(16, 3, name="conv"),
        layers.Rescaling(25.0, name="gain"),
        Mish(name="mish"),
        layers.Rescaling(0.04, name="loss_of_gain"),
        layers.Flatten(name="flat"),
    )


def prune(x):
    return x * ops.cast(np.arange(64) % 4 > 0, x.dtype)


class BatchDeviation(layers.Layer):
    """Appends the standard deviation over the batch, one number."""

    def call(self, x):
        apart = x - ops.mean(x, axis=0, keepdims=True)
        variance = ops.mean(ops.square(apart), axis=0, keepdims=True)
        mean = ops.mean(ops.sqrt(variance + 1e-8), keepdims=True)
        return ops.concatenate([x, ops.zeros_like(x[:, :1]) + mean], -1)


@case(vectors())
def batch_deviation():
    """Pruned units, 0 for all samples: the root of 0 has no slope."""
    pruned = layers.Lambda(prune, output_shape=(64,), name="pruned")
    deviation = BatchDeviation(name="deviation")
    return behind_dense(pruned, deviation, hidden=relu(64, "h1"))


def dead_in_part(shape, dtype):
    return ops.cast(ops.where(ops.arange(64) % 4 == 0, -20.0, 0.0), dtype)


@case(vectors())
def deviation_of_dead_units():
    """The same of a relu, whose gradient takes NaN or selects 0."""
    first = dense(64, bias_initializer=dead_in_part, name="h1")
    parts = layers.ReLU(name="act"), BatchDeviation(name="deviation")
    return behind_dense(*parts, hidden=first)


class Standardize(layers.Layer):
    """Each row with mean 0 and variance 1, from its moments."""

    def call(self, x):
        mean = ops.mean(x, axis=-1, keepdims=True)
        square = ops.mean(x * x, axis=-1, keepdims=True)
        return (x - mean) / ops.sqrt(square - mean * mean + 1e-3)


@dataset(seed=1)
def two_sensors(random):
    a, y = vectors(features=16)()
    b = a * 0.5 + random.normal(size=a.shape)
    return (a, b.astype("float32") * np.float32(500)), y


@case(two_sensors())
def shared_standardization():
    """One layer for two sensors; only the second is too large for it."""
    a, b = keras.Input((16,)), keras.Input((16,))
    standard = Standardize(name="standard")
    x = layers.Concatenate(name="both")([standard(a), standard(b)])
    return keras.Model([a, b], row(x, relu(32, "h1"), dense(4, name="head")))


@dataset
def eights(_):
    """Multiples of 8, which float16 has as they are, about 15000."""
    x, y = vectors(scale=35.0, mean=15000.0)()
    return 8 * np.round(x / 8), y


class Centered(layers.Layer):
    """x less a running mean, in units of 70, clipped to two of them."""

    def build(self, input_shape):
        start = constant(14656.0)
        self.mean = self.add_weight(input_shape[-1:], start, trainable=False)

    def call(self, x, training=False):
        z = ops.clip((x - self.mean) / 70.0, -2.0, 2.0)
        if training:
            step = 0.01 * (ops.mean(x, axis=0) - self.mean)
            self.mean.assign(self.mean + step)
        return z


@case(eights())
def running_mean():
    """Moving averages: 14656 + 3.4 is 14656 in float16."""
    return before_mlp(Centered(name="centered"))


class Delay(layers.Layer):
    """Lets nothing through in its first 2080 steps, 2040 of them done."""

    def build(self, input_shape):
        self.steps = self.add_weight((), constant(2040.0), trainable=False)

    def call(self, x, training=False):
        if training:
            self.steps.assign(self.steps + 1)
        return x * ops.cast(self.steps > 2080, x.dtype)


@case(vectors())
def step_counter():
    """Layers with a delay: 2048 + 1 is 2048 in float16."""
    return before_mlp(Delay(name="delay"))


class StreamingNorm(layers.Layer):
    """Welford's mean and sum of squares, with a million samples behind it."""

    def build(self, input_shape):
        starts = (1e6, ()), (0.0, input_shape[-1:]), (1e6, input_shape[-1:])
        self.count, self.mean, self.squares = (
            self.add_weight(shape, constant(start), trainable=False)
            for start, shape in starts
        )

    def call(self, x, training=False):
        if training:
            new = ops.cast(ops.shape(x)[0], x.dtype)
            delta = ops.mean(x, axis=0) - self.mean
            squares = ops.sum(ops.square(x - self.mean), axis=0)
            self.count.assign(self.count + new)
            self.mean.assign(self.mean + delta * new / self.count)
            self.squares.assign(self.squares + squares)
        variance = self.squares / self.count
        return (x - self.mean) / ops.sqrt(variance + 1e-3)


@case(vectors())
def streaming_statistics():
    """Normalizers that count samples, resumed from a checkpoint."""
    return before_mlp(StreamingNorm(name="streaming"))


class MovingStandardizer(layers.Layer):
    """(x - mean) / std of moving statistics that start from 0 and 1.

    With `autocast` torch would lose what a float16 layer assigns to them.
    """

    def build(self, input_shape):
        kept = {"trainable": False, "autocast": False}
        self.steps = self.add_weight((), "zeros", **kept)
        self.mean = self.add_weight(input_shape[-1:], "zeros", **kept)
        self.variance = self.add_weight(input_shape[-1:], "ones", **kept)

    def call(self, x, training=False):
        if training:
            mean = ops.mean(x, axis=0)
            variance = ops.mean(ops.square(x - mean), axis=0)
            self.steps.assign(self.steps + 1)
            self.mean.assign(0.9 * self.own(self.mean) + 0.1 * mean)
            self.variance.assign(0.9 * self.own(self.variance) + 0.1 * variance)
        root = ops.rsqrt(self.own(self.variance) + 1e-3)
        return (x - self.own(self.mean)) * root

    def own(self, variable):
        return ops.cast(variable, self.compute_dtype)


@case(vectors(scale=3.0, mean=2.0))
def healthy_moving_statistics():
    """They lose digits that their data do not have either."""
    return before_mlp(MovingStandardizer())


class Running(layers.Layer):
    """Subtracts a moving average that is kept in float32."""

    def build(self, shape):
        kept = {"trainable": False, "autocast": False, "name": "mean"}
        self.mean = self.add_weight(shape[-1:], "zeros", **kept)

    def call(self, x, training=False):
        if training:
            batch = ops.cast(ops.mean(x, axis=0), "float32")
            self.mean.assign(0.9995 * self.mean + 0.0005 * batch)
        return x - ops.cast(self.mean, x.dtype)


@case(vectors(mean=3.0))
def sound_running_mean():
    """A moving average of small steps, in float32."""
    centre = Running(name="centre")
    return chain((32,), centre, relu(32, "h1"), dense(4, name="head"))


class Equalized(layers.Layer):
    """Weights of 256 times their size, scaled down as they are used."""

    def build(self, input_shape):
        start = keras.initializers.RandomNormal(stddev=1024.0)
        self.kernel = self.add_weight((input_shape[-1], 64), start)

    def call(self, x):
        return ops.relu(ops.matmul(x, self.kernel * 2.0**-13))


@case(vectors())
def healthy_equalized():
    """Powers of two cancel exactly; gradients are small and large enough."""
    return classifier((32,), Equalized(name="equalized"))


@case(images())
def healthy_batch_of_one():
    """Each instance is normalized on its own."""
    convs = [conv(16, 3, activation="relu") for _ in range(2)]
    convs.insert(1, layers.GroupNormalization(-1))
    return classifier((8, 8, 3), *convs, layers.GlobalAveragePooling2D())


@case(vectors(scale=6.0))
def mish_by_hand():
    """Right forward, as tanh(inf) is 1; inf / inf in its slope."""
    return behind_dense(Mish(name="mish"))


class SteadyMish(layers.Layer):
    """x tanh(softplus(x)) by a logarithm that does not overflow."""

    def call(self, x):
        return x * ops.tanh(ops.logaddexp(x, 0.0 * x))


@case(vectors(scale=4.0))
def healthy_mish():
    """The maximum is taken out first."""
    return behind_dense(SteadyMish(name="mish"))


class CubicGelu(layers.Layer):
    """GELU by its cubic; the cube of 50 is infinite, its tanh is 1."""

    def call(self, x):
        cube = x * x * x
        return 0.5 * x * (1.0 + ops.tanh(0.8 * (x + 0.0447 * cube)))


@case(vectors(scale=50.0))
def healthy_cubic_gelu():
    """An infinity that a tanh makes 1, forward; its slope is 0 backward."""
    scale = layers.Rescaling(0.02, name="scale")
    return behind_dense(CubicGelu(name="gelu"), scale)
