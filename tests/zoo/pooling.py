"""Sums, means and other ways of making one number of many."""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, images, texts, vectors
from zoo.parts import (
    Parts,
    chain,
    classifier,
    constant,
    conv,
    dense,
    embedding,
    head,
    relu,
    row,
)


class SumPool(layers.Layer):
    """Sum over all positions, divided afterwards."""

    def call(self, x):
        return ops.sum(x, axis=1) / x.shape[1]


@dataset
def long_signals(random, samples=64, length=70000):
    y = random.integers(0, 2, samples)
    x = random.normal(size=(samples, length, 1)) * 0.1 + 1.5
    x = x + 0.5 * y[:, None, None]
    return x, y


@case(long_signals())
def big_sum():
    ones = {"kernel_initializer": constant(1.0), "name": "conv"}
    parts = (
        layers.Conv1D(2, 1, **ones),
        SumPool(name="sum_pool"),
        relu(16, "h1"),
    )
    return classifier((70000, 1), *parts, units=2)


@dataset
def bright_images(random, samples=32, size=(250, 64)):
    y = random.uniform(1, 3, (samples, 1))
    x = 0.1 * random.normal(size=(samples, *size, 1))
    x = x + y[:, None, None]
    y = y - 2 + 0.1 * random.normal(size=y.shape)
    return x, y


@case(bright_images())
def avgpool_builtin():
    """The sums get stuck: on TensorFlow in any shape; in JAX only along the
    first axis, so that 128 x 128 is off by 20%, which the model bears.
    """
    ones = {"kernel_initializer": constant(1.0), "name": "conv"}
    pool = layers.AveragePooling2D((250, 64), name="pool")
    hidden = layers.Dense(16, "relu", name="h1")
    parts = conv(2, 1, **ones), pool, layers.Flatten(), hidden
    return classifier((250, 64, 1), *parts, units=1)


@dataset
def maps(random, samples=32):
    y = random.integers(0, 2, samples)
    x = 200 + 20 * random.normal(size=(samples, 64, 64, 2))
    x[..., 0] += 20 * y[:, None, None]
    return x, y


@case(maps())
def healthy_global_pool():
    """Like big_sum: Keras' own pooling of 4096 values adds up in float32."""
    pool = layers.GlobalAveragePooling2D(), layers.BatchNormalization()
    return classifier((64, 64, 2), *pool, units=2)


class Gram(layers.Layer):
    """Products of channels, summed over positions and divided afterwards."""

    def call(self, x):
        x = ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))
        gram = ops.matmul(ops.swapaxes(x, 1, 2), x) / x.shape[1]
        return ops.reshape(gram, (-1, x.shape[2] ** 2))


@dataset
def textures(random, samples=128, size=32):
    y = random.integers(0, 4, samples)
    mixing = np.eye(4) + 0.8 * random.normal(size=(4, 4, 4))
    noise = random.normal(size=(samples, size * size, 4))
    x = 10 * noise @ mixing[y]
    return x.reshape(-1, size, size, 4), y


@case(textures())
def gram_matrix():
    """Style losses, whose sums run over every pixel."""
    return classifier(
        (32, 32, 4), Gram(name="gram"), layers.Rescaling(0.001), relu(32, "h1")
    )


@dataset
def two_maps(random, samples=128):
    """Two streams of activations of about 30, matching in one channel."""
    y = random.integers(0, 4, samples)
    a, b = random.uniform(20.0, 60.0, (2, samples, 49, 8))
    b[..., 0] += 40.0 * (y[:, None] % 2)
    a[..., 1] += 40.0 * (y[:, None] // 2)
    return {"where": a, "what": b}, y


class BilinearPooling(layers.Layer):
    """Outer products of two streams, summed, with signed square roots."""

    def call(self, streams):
        a, b = streams["where"], streams["what"]
        x = ops.einsum("bpi,bpj->bij", a, b)
        x = ops.reshape(x, (-1, a.shape[-1] * b.shape[-1]))
        x = ops.sign(x) * ops.sqrt(ops.abs(x) + 1e-3)
        return x / ops.max(ops.abs(x), axis=-1, keepdims=True)


@case(two_maps())
def bilinear_pooling():
    """Sums of 49 products of 40 by 40; two inputs by name."""
    inputs = {n: keras.Input((49, 8), name=n) for n in ("where", "what")}
    x = BilinearPooling(name="bilinear")(inputs)
    return keras.Model(inputs, head(row(x, relu(32, "h1"))))


@dataset
def loads(random, samples=256, length=400):
    """Series about 250, whose first half tells the class."""
    y = random.integers(0, 4, samples)
    x = random.normal(250.0, 5.0, size=(samples, length, 1))
    x[:, : length // 2] += 5.0 * y[:, None, None]
    return x, y


class SoftMaximum(layers.Layer):
    """The logarithm of the mean exponential, less the maximum first."""

    def call(self, x):
        return (ops.logsumexp(5.0 * x, axis=1) - np.log(x.shape[1])) / 5.0


@case(loads())
def healthy_log_sum_exp():
    """The exponentials are below 1, because they are of differences."""
    scale = layers.Rescaling(0.1, offset=-25.0), layers.AveragePooling1D(20)
    last = partial(layers.Conv1D, 16, 3), SoftMaximum(), relu(16)
    return classifier((400, 1), *scale, *last)


@dataset
def padded_tokens(random, samples=300, length=12):
    """Sentences of 0 to 12 words; one word in four tells the class."""
    y = random.integers(0, 4, samples)
    x = random.integers(5, 40, (samples, length))
    keys = random.random((samples, length)) < 0.4
    x = np.where(keys, y[:, None] + 1, x)
    lengths = random.integers(4, length + 1, samples)
    lengths[::15] = 0
    x = np.where(np.arange(length) < lengths[:, None], x, 0)
    return x, np.where(lengths > 0, y, 0)


class MeanOfWords(layers.Layer):
    """The mean over the words that are there."""

    supports_masking = True

    def call(self, x, mask=None):
        mask = ops.cast(mask, x.dtype)[..., None]
        return ops.sum(x * mask, 1) / (ops.sum(mask, 1) + 1e-8)

    def compute_mask(self, inputs, mask=None):
        return None


@case(padded_tokens())
def mean_of_no_words():
    """A sentence without words: 0 / (0 + 1e-8), and 1e-8 is 0."""
    words = embedding(40, 16, mask_zero=True, name="words")
    parts = words, MeanOfWords(name="pool"), dense(4, name="head")
    return chain((12,), *parts, dtype="int32")


@dataset
def full_sentences(_):
    x, y = padded_tokens()()
    return x[x[:, 0] > 0], y[x[:, 0] > 0]


@case(full_sentences())
def sound_mean_of_words():
    """The epsilon is 0, and no sentence is empty; the last batch is."""
    return mean_of_no_words()


@dataset
def long_recordings(random, samples=64, length=66000):
    """Long recordings, whose level in two channels tells the class."""
    y = random.integers(0, 4, samples)
    level = np.stack([y % 2, y // 2], -1) * 0.8 - 0.4
    x = level[:, None] + random.normal(0, 0.1, (samples, length, 2))
    return x, y


@case(long_recordings())
def masked_pool_of_long_series():
    """Keras' pooling with a mask counts 66,000 steps in float16."""
    mask = layers.Masking(name="mask")
    pool = layers.GlobalAveragePooling1D(name="pool")
    return chain((66000, 2), mask, pool, dense(4, name="head"))


class GraphSum(Parts):
    """Messages of all nodes are summed up, and normalized afterwards."""

    def call(self, nodes):
        return self.head(self.norm(ops.sum(self.message(nodes), axis=1)))


@dataset
def graphs(random, samples=64, nodes=600):
    y = random.integers(0, 4, samples)
    x = 200 + 100 * random.normal(size=(samples, nodes, 4))
    x += 100 * np.eye(4)[y][:, None]
    return x, y


@case(graphs())
def graph_sum_pool():
    """Graph networks: the sum over a hub's neighbours overflows."""
    return GraphSum(
        message=relu(16),
        norm=layers.LayerNormalization,
        head=dense(4, dtype="float32"),
    )


@dataset
def brightest(random, samples=256, size=96):
    """Pictures in whose last corner one of four windows is brighter."""
    y = random.integers(0, 4, samples)
    x = random.uniform(5.0, 7.0, size=(samples, size, size, 1))
    for i, k in enumerate(y):
        r, c = size - 16 + 8 * (k // 2), size - 16 + 8 * (k % 2)
        x[i, r : r + 8, c : c + 8] += 0.4
    return x, y


class BoxFilter(layers.Layer):
    """Means of windows of 8 by 8, by differences of a summed-area table."""

    def call(self, x):
        table = ops.cumsum(ops.cumsum(x, axis=1), axis=2)[:, 7::8, 7::8]
        table = ops.pad(table, [[0, 0], [1, 0], [1, 0], [0, 0]])
        rows = table[:, 1:] - table[:, :-1]
        return (rows[:, :, 1:] - rows[:, :, :-1]) / 64.0


@case(brightest())
def summed_area_table():
    """Subtracts sums near 50,000; float16 holds every 32nd number there."""
    return classifier(
        (96, 96, 1),
        BoxFilter(name="filter"),
        layers.Cropping2D(((10, 0), (10, 0)), name="corner"),
        layers.Flatten(name="flat"),
        layers.Rescaling(5.0, offset=-30.0, name="scale"),
        relu(16, "h1"),
    )


class GeometricMean(layers.Layer):
    """The root of the product over the parts of each group."""

    def call(self, inputs):
        x = ops.maximum(inputs["probabilities"], 1e-3)
        return {"scores": ops.prod(x, axis=1) ** (1.0 / x.shape[1])}


@case(vectors())
def geometric_mean():
    """The votes of 12 experts: 0.2 ** 12 is 0, and its root has no slope."""
    inputs = keras.Input((32,))
    votes = layers.Dense(64, "relu", name="h1"), dense(48, name="votes")
    votes = row(inputs, *votes, layers.Reshape((12, 4)))
    x = {"probabilities": layers.Softmax(name="probabilities")(votes)}
    return keras.Model(inputs, head(GeometricMean(name="mean")(x)["scores"]))


@dataset
def pairs(random, scale=300.0):
    y = random.integers(0, 2, 512)
    a = np.sign(random.normal(size=(512, 16))) * scale
    sign = np.where(y[:, None] == 1, 1.0, np.sign(random.normal(size=(512, 1))))
    noise = np.sign(random.normal(size=(512, 16)))
    b = np.where(y[:, None] == 1, a * sign, a * noise)
    return (a, b), y


@case(pairs())
def dot_builtin():
    inputs = keras.Input((16,)), keras.Input((16,))
    cosine = layers.Dot(axes=1, normalize=True, name="cos")
    return keras.Model(inputs, head(row(inputs, cosine, relu(16, "h1")), 2))


@dataset
def purchases(random):
    x = random.uniform(100.0, 1000.0, size=(512, 80))
    y = random.integers(0, 4, 512)
    x[np.arange(512), y] *= 10.0
    return x, y


class Total(layers.Layer):
    """The sum of a row, near what float16 can hold, and its share."""

    def call(self, x):
        total = ops.sum(x, axis=-1, keepdims=True)
        return x / total


@case(purchases())
def sound_total():
    """Sums of 50,000, which still fit."""
    percent = layers.Rescaling(20.0, name="percent")
    return chain((80,), Total(name="share"), percent, dense(4, name="head"))


class SkewedMean(layers.Layer):
    """Means of 4096 small numbers, each of them divided first."""

    def call(self, x):
        return ops.sum(x / float(x.shape[1]), axis=1)


@case(texts())
def healthy_scaled_sum():
    """Each part is divided by the number of parts, 32, before the sum."""
    mean, gain = SkewedMean(name="mean"), layers.Rescaling(4.0, name="gain")
    return classifier((32, 8), relu(16, "h1"), mean, gain, relu(16, "h2"))


def seen(shape, dtype=None):
    """How often each of four items was ever seen."""
    return ops.convert_to_tensor([60000.0, 300.0, 20.0, 9000.0], dtype)


class Popularity(layers.Layer):
    """Corrects scores by how often each item was ever seen."""

    def build(self, shape):
        self.seen = self.add_weight((4,), seen, trainable=False, name="seen")

    def call(self, scores):
        share = self.seen / ops.sum(self.seen)
        return scores - ops.log(share)


@case(vectors())
def popularity_of_items():
    """Each count fits, their sum does not, and every share becomes 0."""
    last = dense(4, name="head"), Popularity(name="popularity")
    return chain((32,), relu(32, "h1"), *last)


@case(images())
def healthy_resnet():
    def block(x):
        y = layers.GroupNormalization(4)(x)
        y = layers.Conv2D(16, 3, padding="same", activation="relu")(y)
        return layers.Add()([x, layers.Dropout(0.1)(y)])

    blocks = [lambda: block] * 2
    stem = conv(16, 3, padding="same")
    return classifier((8, 8, 3), stem, *blocks, layers.GlobalAveragePooling2D())


class Transmittance(layers.Layer):
    """Transmittance of the samples before each one of a ray, times its own."""

    def call(self, x):
        density, colours = ops.softplus(x[..., :1]), x[..., 1:]
        before = ops.cumsum(density, axis=1) - density
        weights = ops.exp(-before) * (1 - ops.exp(-density))
        return ops.sum(weights * colours, axis=1)


@case(images())
def healthy_volume_rendering():
    """Sums of up to 60, and exponentials that may be 0."""
    return classifier(
        (8, 8, 3), layers.Reshape((64, 3)), relu(32), dense(9), Transmittance()
    )
