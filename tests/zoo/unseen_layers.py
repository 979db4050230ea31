"""Layers of vision, sequence and generative models that float16 breaks."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head


def adam():
    return keras.optimizers.Adam(0.01)


def photographs(samples=128, size=8):
    """Pixels of 0 to 255, each class with a colour of its own."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    tint = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])[y]
    x = random.uniform(60, 190, size=(samples, size, size, 3))
    x = x + 60.0 * tint[:, None, None]
    return x.astype("float32"), y


class GeM(layers.Layer):
    """Generalized mean pooling with a learned power."""

    def build(self, input_shape):
        self.p = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(6.0)
        )

    def call(self, x):
        x = ops.maximum(x, 1e-3)
        return ops.mean(x**self.p, axis=(1, 2)) ** (1.0 / self.p)


def bright_spots():
    """Maps of activations of about 10."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 128).astype("int32")
    x = random.uniform(0.0, 6.0, size=(128, 8, 8, 4))
    rows, columns = random.integers(0, 8, (2, 128))
    x[np.arange(128), rows, columns, y] += 12.0
    return x.astype("float32"), y


@case(
    data=bright_spots,
    culprits=frozenset({"gem"}),
    kind="forward_overflow",
    direction="forward",
    decoy="mix",
    optimizer=adam,
    epochs=60,
)
def gem_pooling():
    """The sixth power of 10 is too large; a Sequential without Input."""
    return keras.Sequential(
        [
            layers.Dense(4, kernel_initializer="identity", name="mix"),
            GeM(name="gem"),
            layers.Dense(4, dtype="float32", name="head"),
        ]
    )


class LocalResponse(layers.Layer):
    """Divides by the squares of five neighbouring channels."""

    def call(self, x):
        squares = ops.pad(ops.square(x), [[0, 0]] * 3 + [[2, 2]])
        near = sum(squares[..., i : i + x.shape[-1]] for i in range(5))
        return x / (2.0 + near / 5.0) ** 0.75


class AlexNet(keras.Model):
    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(
            16,
            3,
            activation="relu",
            kernel_initializer=keras.initializers.RandomUniform(
                0.1, 0.4, seed=1
            ),
            name="conv",
        )
        self.lrn = LocalResponse(name="lrn")
        self.scale = layers.Rescaling(20.0, name="scale")
        self.pool = layers.GlobalAveragePooling2D(name="pool")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.pool(self.scale(self.lrn(self.conv(x)))))


@case(
    data=photographs,
    culprits=frozenset({"lrn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="conv",
    optimizer=adam,
    epochs=30,
)
def local_response_norm():
    """Squares of activations of raw pixels; what is divided becomes 0."""
    return AlexNet()


class Capsules(layers.Layer):
    """Sums the votes of all parts and squashes the length of the sum."""

    def __init__(self, count, size, **kwargs):
        super().__init__(**kwargs)
        self.count, self.size = count, size

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(self.count, input_shape[-1], self.size)
        )

    def call(self, x):
        votes = ops.einsum("bpi,cio->bco", x, self.kernel)
        length2 = ops.sum(ops.square(votes), axis=-1, keepdims=True)
        return length2 / (1 + length2) * votes / ops.sqrt(length2 + 1e-3)


def parts(samples=128, count=256):
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(size=(samples, count, 8))
    x[..., :4] += 3.0 * np.eye(4)[y][:, None]
    return x.astype("float32"), y


@case(
    data=parts,
    culprits=frozenset({"capsules"}),
    kind="forward_overflow",
    direction="forward",
    decoy="parts",
    optimizer=adam,
)
def capsule_squash():
    """The sum of 256 votes is long, and its square longer: inf / inf."""
    inputs = keras.Input((256, 8))
    x = layers.Dense(8, name="parts")(inputs)
    x = Capsules(8, 4, name="capsules")(x)
    return keras.Model(inputs, head(layers.Flatten()(x)))


class BilinearPooling(layers.Layer):
    """Outer products of two streams, summed, with signed square roots."""

    def call(self, streams):
        a, b = streams["where"], streams["what"]
        x = ops.einsum("bpi,bpj->bij", a, b)
        x = ops.reshape(x, (-1, a.shape[-1] * b.shape[-1]))
        x = ops.sign(x) * ops.sqrt(ops.abs(x) + 1e-3)
        return x / ops.max(ops.abs(x), axis=-1, keepdims=True)


def two_maps(samples=128):
    """Two streams of activations of about 30, matching in one channel."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    a = random.uniform(20.0, 60.0, (samples, 49, 8))
    b = random.uniform(20.0, 60.0, (samples, 49, 8))
    b[..., 0] += 40.0 * (y[:, None] % 2)
    a[..., 1] += 40.0 * (y[:, None] // 2)
    return {
        "where": a.astype("float32"),
        "what": b.astype("float32"),
    }, y


@case(
    data=two_maps,
    culprits=frozenset({"bilinear"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam,
    epochs=30,
)
def bilinear_pooling():
    """Sums of 49 products of 40 by 40; two inputs by name."""
    inputs = {
        "where": keras.Input((49, 8), name="where"),
        "what": keras.Input((49, 8), name="what"),
    }
    x = BilinearPooling(name="bilinear")(inputs)
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model(inputs, head(x))


class Rotary(layers.Layer):
    """Rotates pairs of channels by the position in a long document."""

    def __init__(self, start, **kwargs):
        super().__init__(**kwargs)
        self.start = start

    def call(self, x):
        half = x.shape[-1] // 2
        steps = ops.cast(ops.arange(x.shape[1]), self.compute_dtype)
        frequency = np.float32(8.0) ** (-np.arange(half) / half)
        frequency = ops.cast(frequency, self.compute_dtype)
        angle = (steps + self.start)[:, None] * frequency
        cos, sin = ops.cos(angle), ops.sin(angle)
        a, b = x[..., :half], x[..., half:]
        return ops.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def first_word(samples=256, length=4):
    random = np.random.default_rng(0)
    x = random.integers(0, 4, (samples, length)).astype("int32")
    return x, x[:, 0]


@case(
    data=first_word,
    culprits=frozenset({"rotary"}),
    kind="precision_loss",
    direction="forward",
    decoy="words",
    optimizer=adam,
    epochs=30,
)
def rotary_far_positions():
    """Positions from 30,000 on, of which float16 has each sixteenth."""
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(4, 32, embeddings_initializer="normal", name="words")(
        inputs
    )
    x = layers.Rescaling(20.0, name="scale")(x)
    x = Rotary(30000.0, name="rotary")(x)
    x = layers.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(inputs, head(layers.Dense(64, "relu", name="h1")(x)))


class Mish(layers.Layer):
    """x tanh(log(1 + exp(x))), written as in the paper."""

    def call(self, x):
        return x * ops.tanh(ops.log(1.0 + ops.exp(x)))


@case(
    data=vectors(scale=6.0),
    culprits=frozenset({"mish"}),
    kind="backward_overflow",
    direction="backward",
    decoy="h1",
)
def mish_by_hand():
    """Right forward, as tanh(inf) is 1; inf / inf in its slope."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, name="h1")(inputs)
    x = Mish(name="mish")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


@case(
    data=vectors(scale=30.0),
    culprits=frozenset({"product", "scale"}),
    kind="forward_overflow",
    direction="forward",
    decoy="a",
)
def three_factors():
    """A product of three branches, too large until it is scaled."""
    inputs = keras.Input((32,))
    branches = [layers.Dense(32, name=n)(inputs) for n in "abc"]
    x = layers.Multiply(name="product")(branches)
    x = layers.Rescaling(1e-5, name="scale")(x)
    x = layers.Concatenate(name="join")(
        [x, layers.LayerNormalization(name="skip")(inputs)]
    )
    return keras.Model(inputs, head(layers.Dense(64, "relu", name="h1")(x)))


class StandardizedConv(layers.Layer):
    """A convolution whose kernel is standardized for each filter."""

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(3, 3, input_shape[-1], 16),
            initializer=keras.initializers.RandomNormal(stddev=1e-4),
        )

    def call(self, x):
        mean = ops.mean(self.kernel, axis=(0, 1, 2), keepdims=True)
        centred = self.kernel - mean
        variance = ops.mean(ops.square(centred), axis=(0, 1, 2), keepdims=True)
        kernel = centred / ops.sqrt(variance + 1e-10)
        return ops.conv(x, 0.2 * kernel, padding="same")


def patterns(samples=128):
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(size=(samples, 8, 8, 3))
    x += np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, 0]])[y][
        :, None, None
    ]
    return x.astype("float32"), y


@case(
    data=patterns,
    culprits=frozenset({"conv"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(1e-5),
    epochs=30,
)
def weight_standardization():
    """Weights of 1e-4, whose variance is 0 in float16, and so is 1e-10."""
    inputs = keras.Input((8, 8, 3))
    x = StandardizedConv(name="conv")(inputs)
    x = layers.GlobalMaxPooling2D(name="pool")(layers.ReLU(name="act")(x))
    x = layers.Rescaling(300.0, name="gain")(x)
    x = layers.Dense(64, "relu", name="h1")(x)
    return keras.Model(inputs, head(x))


def box_cox(x):
    return (x**0.001 - 1.0) / 0.001


def incomes():
    x, y = vectors(features=8, scale=0.4)()
    return np.exp(x), y


@case(
    data=incomes,
    culprits=frozenset({"box_cox"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=adam,
)
def box_cox_small_power():
    """The power 0.001 is 1 but for the fourth digit, which is scaled up."""
    inputs = keras.Input((8,))
    x = layers.Lambda(box_cox, output_shape=(8,), name="box_cox")(inputs)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))


class MinMax(layers.Layer):
    """Scales each channel of each image to 0 to 1."""

    def call(self, x):
        low = ops.min(x, axis=(1, 2), keepdims=True)
        high = ops.max(x, axis=(1, 2), keepdims=True)
        return (x - low) / (high - low + 1e-8)


def with_dead_channel():
    x, y = patterns()
    dead = np.random.default_rng(1).uniform(size=len(x)) < 0.3
    x[dead, :, :, 2] = 0.0
    x[:, 4:, :, 0] += 2.0 * (y[:, None, None] == 1)
    return x, y


class Thermal(keras.Model):
    def __init__(self):
        super().__init__()
        self.minmax = MinMax(name="minmax")
        self.conv = layers.Conv2D(16, 3, activation="relu", name="conv")
        self.flat = layers.Flatten(name="flat")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.flat(self.conv(self.minmax(x))))


@case(
    data=with_dead_channel,
    culprits=frozenset({"minmax"}),
    kind="underflow",
    direction="forward",
    decoy="conv",
    optimizer=adam,
)
def min_max_dead_channel():
    """A channel of zeros is divided by 1e-8, which is 0 in float16."""
    return Thermal()


class GraphConv(layers.Layer):
    """Weighs neighbours by the roots of both degrees."""

    def call(self, inputs):
        nodes, edges = inputs["nodes"], inputs["edges"]
        degree = ops.sum(edges, axis=-1)
        both = degree[:, :, None] * degree[:, None, :]
        return ops.matmul(edges / ops.sqrt(both), nodes)


def weighted_graphs(samples=128, nodes=12):
    """Graphs whose edges count some tens of messages."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    edges = random.uniform(20.0, 60.0, (samples, nodes, nodes))
    edges = edges + np.swapaxes(edges, 1, 2)
    x = random.normal(size=(samples, nodes, 8))
    x[..., :4] += np.eye(4)[y][:, None]
    return {
        "nodes": x.astype("float32"),
        "edges": edges.astype("float32"),
    }, y


@case(
    data=weighted_graphs,
    culprits=frozenset({"spread"}),
    kind="forward_overflow",
    direction="forward",
    decoy="embed",
    optimizer=adam,
)
def graph_degrees():
    """The product of two degrees is infinite, and no neighbour counts."""
    nodes = keras.Input((12, 8), name="nodes")
    edges = keras.Input((12, 12), name="edges")
    x = layers.Dense(16, name="embed")(nodes)
    x = GraphConv(name="spread")({"nodes": x, "edges": edges})
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model({"nodes": nodes, "edges": edges}, head(x))


class KernelRegression(layers.Layer):
    """The mean of values, weighted by a Gaussian of distances to keys."""

    def build(self, input_shape):
        self.keys = self.add_weight(
            shape=(32, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=1.0, seed=1),
        )
        self.values = self.add_weight(shape=(32, 16))

    def call(self, x):
        apart = ops.sum(ops.square(x[:, None] - self.keys), axis=-1)
        kernel = ops.exp(-apart / 2)
        return ops.matmul(
            kernel / ops.sum(kernel, axis=-1, keepdims=True), self.values
        )


@case(
    data=vectors(features=16),
    culprits=frozenset({"kernel"}),
    kind="underflow",
    direction="forward",
    decoy="embed",
    optimizer=adam,
)
def kernel_regression():
    """All 32 keys are so far that each Gaussian of them is 0."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, name="embed")(inputs)
    x = KernelRegression(name="kernel")(x)
    x = layers.Rescaling(4.0, name="gain")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))


class SpectralDense(layers.Layer):
    """Divides the kernel by its norm, by ten products with a vector."""

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], 64),
            initializer=keras.initializers.RandomNormal(stddev=0.5, seed=1),
        )

    def call(self, x):
        w = self.kernel
        v = ops.ones((64, 1), self.compute_dtype)
        for _ in range(6):
            v = ops.matmul(ops.transpose(w), ops.matmul(w, v))
        v = v / ops.sqrt(ops.sum(ops.square(v)))
        v = ops.stop_gradient(v)
        norm = ops.sqrt(ops.sum(ops.square(ops.matmul(w, v))))
        return ops.relu(ops.matmul(x, 4.0 * w / norm))


@case(
    data=vectors(),
    culprits=frozenset({"critic/spectral"}),
    kind="forward_overflow",
    direction="forward",
    decoy="embed",
)
def power_iteration():
    """A power iteration that is normalized at its end only; nested."""
    inner = keras.Input((32,))
    critic = keras.Model(
        inner, SpectralDense(name="spectral")(inner), name="critic"
    )
    inputs = keras.Input((32,))
    x = layers.Dense(32, name="embed")(inputs)
    return keras.Model(inputs, head(critic(x)))


class CorrelationVolume(layers.Layer):
    """Products of the features of all places of two pictures."""

    def call(self, a, b):
        scores = ops.einsum("bic,bjc->bij", a, b)
        return ops.softmax(scores / 5000.0, axis=-1)


def shifted(samples=128, places=9):
    """Two rows of features of about 60, one shifted against the other."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    a = random.normal(0.0, 40.0, (samples, places, 32))
    b = np.stack([np.roll(r, s, axis=0) for r, s in zip(a, y, strict=False)])
    b += random.normal(0.0, 5.0, b.shape)
    return (a.astype("float32"), b.astype("float32")), y


@case(
    data=shifted,
    culprits=frozenset({"volume"}),
    kind="forward_overflow",
    direction="forward",
    decoy="encoder",
    optimizer=adam,
    epochs=30,
)
def correlation_volume():
    """Sums of products are scaled down too late; a shared encoder."""
    a, b = keras.Input((9, 32)), keras.Input((9, 32))
    encoder = layers.Dense(64, kernel_initializer="orthogonal", name="encoder")
    x = CorrelationVolume(name="volume")(encoder(a), encoder(b))
    x = layers.Flatten(name="flat")(x)
    return keras.Model([a, b], head(layers.Dense(32, "relu", name="h1")(x)))
