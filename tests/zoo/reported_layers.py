"""Layers of the kinds that public reports blame for failing in float16."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head, images
from zoo.faults import before_mlp, normal


class GumbelGate(layers.Layer):
    """Softmax of logits with Gumbel noise of rounded uniform numbers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        uniform = keras.random.uniform(ops.shape(x), seed=self.seed_generator)
        uniform = ops.cast(uniform, x.dtype)
        noise = -ops.log(-ops.log(uniform + 1e-20) + 1e-20)
        return x * ops.softmax(0.1 * (x + noise))


@case(
    data=vectors(),
    culprits=frozenset({"gumbel"}),
    kind="underflow",
    direction="forward",
    decoy="wide",
)
def gumbel_noise():
    """Reported of Gumbel softmaxes: one draw in 4096 rounds to 1."""
    inputs = keras.Input((32,))
    x = layers.Dense(512, "relu", name="wide")(inputs)
    x = layers.Rescaling(100.0)(GumbelGate(name="gumbel")(x))
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))


class Quantizer(layers.Layer):
    """Replaces each vector by the nearest code, by |x|^2 - 2 x e + |e|^2."""

    def __init__(self, codes, **kwargs):
        super().__init__(**kwargs)
        self.codes = codes

    def build(self, input_shape):
        self.codebook = self.add_weight(
            shape=self.codes.shape,
            initializer=lambda shape, dtype=None: ops.convert_to_tensor(
                self.codes, dtype or "float32"
            ),
            trainable=False,
        )

    def call(self, x):
        squares = ops.sum(ops.square(self.codebook), axis=-1)
        product = ops.matmul(x, ops.transpose(self.codebook))
        distances = ops.sum(ops.square(x), -1, keepdims=True) - 2 * product
        nearest = ops.argmin(distances + squares, axis=-1)
        return 5 * ops.take(self.codebook - 20.0, nearest, axis=0)


def around_codes(offset=20.0, codes=16, samples=512):
    """Vectors near codes far from zero, and which quarter they are of."""
    random = np.random.default_rng(0)
    book = offset + 0.2 * random.normal(size=(codes, 32)).astype("float32")
    which = random.integers(0, codes, samples)
    x = book[which] + 0.05 * random.normal(size=(samples, 32))
    return x.astype("float32"), (which % 4).astype("int32"), book


@case(
    data=lambda: around_codes()[:2],
    culprits=frozenset({"quantizer"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def nearest_code():
    """Reported of vector quantizers: distances as differences of squares."""
    return before_mlp(Quantizer(around_codes()[2], name="quantizer"))


class ModulatedDense(layers.Layer):
    """A kernel scaled by a style, then divided by the root of its squares."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.style = layers.Dense(
            units=32, bias_initializer=keras.initializers.Constant(200.0)
        )

    def build(self, input_shape):
        self.style.build(input_shape)
        self.kernel = self.add_weight(
            shape=(input_shape[-1], self.units), initializer=normal(1.0)
        )

    def call(self, x):
        kernel = self.style(x)[:, :, None] * self.kernel
        squares = ops.sum(ops.square(kernel), axis=1, keepdims=True)
        kernel = kernel * ops.rsqrt(squares + 1e-8)
        return ops.squeeze(ops.matmul(x[:, None], kernel), 1)


@case(
    data=vectors(),
    culprits=frozenset({"modulated"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def weight_demodulation():
    """Reported of style-based generators: 1/sqrt(inf) is 0, in silence."""
    return before_mlp(ModulatedDense(32, name="modulated"))


class Gram(layers.Layer):
    """Products of channels, summed over positions and divided afterwards."""

    def call(self, x):
        x = ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))
        gram = ops.matmul(ops.swapaxes(x, 1, 2), x) / x.shape[1]
        return ops.reshape(gram, (-1, x.shape[2] ** 2))


def textures(samples=128, size=32):
    def data():
        random = np.random.default_rng(0)
        y = random.integers(0, 4, samples)
        mixing = np.eye(4) + 0.8 * random.normal(size=(4, 4, 4))
        noise = random.normal(size=(samples, size * size, 4))
        x = 10 * noise @ mixing[y]
        return x.reshape(-1, size, size, 4).astype("float32"), y.astype("int32")

    return data


@case(
    data=textures(),
    culprits=frozenset({"gram"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def gram_matrix():
    """Reported of style losses, whose sums run over every pixel."""
    inputs = keras.Input((32, 32, 4))
    x = Gram(name="gram")(inputs)
    x = layers.Rescaling(1e-3)(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))


class Whitening(layers.Layer):
    """Newton-Schulz root of E[x x^T] - E[x] E[x]^T over the batch."""

    def call(self, x):
        count = ops.cast(ops.shape(x)[0], x.dtype)
        mean = ops.mean(x, axis=0, keepdims=True)
        covariance = ops.matmul(ops.transpose(x), x / count)
        covariance = covariance - ops.matmul(ops.transpose(mean), mean)
        eye = ops.eye(x.shape[-1], dtype=x.dtype)
        covariance = covariance + 0.1 * eye
        trace = ops.sum(covariance * eye)
        covariance, root = covariance / trace, eye
        for _ in range(5):
            cube = ops.matmul(root, ops.matmul(root, root))
            root = 1.5 * root - 0.5 * ops.matmul(cube, covariance)
        return ops.matmul(x - mean, root) * ops.rsqrt(trace)


@case(
    data=vectors(features=8, mean=40.0),
    culprits=frozenset({"whitening"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.005),
)
def whitening():
    """Reported of decorrelated normalization: small differences of squares."""
    inputs = keras.Input((8,))
    x = Whitening(name="whitening")(inputs)
    return keras.Model(inputs, head(layers.Dense(64, "relu", name="h1")(x)))


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


class Decibels(layers.Layer):
    """log(x + 1e-6) / 10."""

    def call(self, x):
        return ops.log(x + 1e-6) / 10


def sounds():
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 512).astype("int32")
    t = np.arange(32) * 2 * np.pi / 32 + random.uniform(0, 6, (512, 1))
    x = 200 * np.sin(t * (2 + 3 * y[:, None])) + random.normal(size=(512, 32))
    return x.astype("float32"), y


@case(
    data=sounds,
    culprits=frozenset({"power", "decibels"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    metric="loss",
)
def log_spectrogram():
    """Reported of speech front ends: energies overflow, their log would fit."""
    inputs = keras.Input((32,))
    x = Decibels(name="decibels")(Power(name="power")(inputs))
    return keras.Model(inputs, head(layers.Dense(64, "relu", name="h1")(x)))


class LinearAttention(layers.Layer):
    """relu(q) (relu(k)^T v), divided by relu(q) sum(relu(k)) + 1e-15."""

    def build(self, input_shape):
        self.projection = layers.Dense(
            3 * input_shape[-1], kernel_initializer=normal(2.0)
        )
        self.projection.build(input_shape)

    def call(self, x):
        q, k, v = ops.split(self.projection(x), 3, axis=-1)
        q, k = ops.relu(q), ops.relu(k)
        weighed = ops.matmul(q, ops.matmul(ops.swapaxes(k, 1, 2), v))
        total = ops.matmul(q, ops.sum(k, axis=1)[:, :, None])
        return weighed / (total + 1e-15)


@case(
    data=images(),
    culprits=frozenset({"attention"}),
    kind="forward_overflow",
    direction="forward",
    decoy="stem",
)
def linear_attention():
    """Reported of attention in linear time, which is advised in float32."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same", name="stem")(inputs)
    x = layers.LayerNormalization()(layers.Reshape((64, 16))(x))
    y = LinearAttention(name="attention")(x)
    x = layers.Add()([x, layers.LayerNormalization()(y)])
    return keras.Model(inputs, head(layers.GlobalAveragePooling1D()(x)))


class Angle(layers.Layer):
    """The angle between two vectors, kept off 0 and pi by 1e-6."""

    def call(self, inputs):
        a, b = (x / ops.norm(x, axis=-1, keepdims=True) for x in inputs)
        cosine = ops.sum(a * b, axis=-1, keepdims=True)
        return ops.arccos(ops.clip(cosine, -1, 1) * (1 - 1e-6))


def near_and_far():
    """Pairs that are near to each other or not, every fourth of them equal."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 512).astype("int32")
    y[::4] = 1
    a, b = random.normal(size=(2, 512, 16)).astype("float32")
    near = a + 0.3 * random.normal(size=a.shape).astype("float32")
    near[::4] = a[::4]
    return (a, np.where(y[:, None] == 1, near, b)), y


@case(
    data=near_and_far,
    culprits=frozenset({"angle"}),
    kind="underflow",
    direction="backward",
    decoy="embedding",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def angle_of_equals():
    """Reported of arccos of a cosine: 1 - 1e-6 is 1, where its slope ends."""
    a, b = keras.Input((16,)), keras.Input((16,))
    embedding = layers.Dense(8, name="embedding")
    x = Angle(name="angle")([embedding(a), embedding(b)])
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model([a, b], head(x, 2))
