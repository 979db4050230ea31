"""Layers as users write them every day, and what float16 breaks in them."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head
from zoo.reported_losses import float32_loss


def counts():
    """Counts of some hundred thousand, as of visits a day."""
    x, _ = vectors(features=16)()
    random = np.random.default_rng(1)
    log_rate = 11.5 + 0.2 * x @ random.normal(size=16)
    return x, random.poisson(np.exp(log_rate))[:, None].astype("float32")


@case(
    data=counts,
    culprits=frozenset({"rate"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    loss="mean_squared_logarithmic_error",
    metric="loss",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def exponential_rate():
    """The rate of a Poisson regression, which starts at the mean count."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(
        1,
        "exponential",
        bias_initializer=keras.initializers.Constant(11.5),
        name="rate",
    )(x)
    return keras.Model(inputs, x)


class CumulativeMean(layers.Layer):
    """The mean of all steps until each one."""

    def call(self, x):
        count = ops.cast(ops.arange(1, x.shape[1] + 1), x.dtype)
        return ops.cumsum(x, axis=1) / count[:, None]


def loads(samples=256, length=400):
    """Series about 250, whose first half tells the class."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(250.0, 5.0, size=(samples, length, 1))
    x[:, : length // 2] += 5.0 * y[:, None, None]
    return x.astype("float32"), y


@case(
    data=loads,
    culprits=frozenset({"encoder/means"}),
    kind="forward_overflow",
    direction="forward",
    decoy="head",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def cumulative_mean():
    """The sum of 400 steps is too large, their mean is not."""
    inputs = keras.Input((400, 1))
    x = CumulativeMean(name="means")(inputs)
    x = layers.Rescaling(0.1, offset=-25.0, name="scale")(x)
    encoder = keras.Model(
        inputs, layers.AveragePooling1D(50)(x), name="encoder"
    )
    inputs = keras.Input((400, 1))
    return keras.Model(inputs, head(layers.Flatten()(encoder(inputs))))


def spots(samples=256):
    """Noise, and at some place one of four patterns."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(0.0, 0.3, size=(samples, 12, 12, 4))
    rows, columns = random.integers(0, 12, (2, samples))
    x[np.arange(samples), rows, columns, y] += 4.0
    return x.astype("float32"), y


@case(
    data=spots,
    culprits=frozenset({"pool"}),
    kind="forward_overflow",
    direction="forward",
    decoy="conv",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def log_sum_exp_pooling():
    """A soft maximum over places, as of weakly labelled images."""

    def pool(x):
        means = ops.mean(ops.exp(5.0 * x), axis=(1, 2))
        return ops.log(means) / 5.0

    inputs = keras.Input((12, 12, 4))
    x = layers.Conv2D(8, 1, name="conv")(inputs)
    x = layers.Lambda(pool, output_shape=(8,), name="pool")(x)
    return keras.Model(inputs, head(x))


class PoincareDistance(layers.Layer):
    """Distances to learned points, all of them inside of the unit ball."""

    def __init__(self, points, **kwargs):
        super().__init__(**kwargs)
        self.count = points

    def build(self, input_shape):
        self.points = self.add_weight(shape=(self.count, input_shape[-1]))

    def call(self, x):
        x, points = map(self.inside, (x, self.points))
        apart = ops.sum(ops.square(x[:, None] - points), axis=-1)
        room_x = 1 - ops.sum(ops.square(x), axis=-1)
        room = 1 - ops.sum(ops.square(points), axis=-1)
        z = 1 + 2 * apart / (room_x[:, None] * room)
        return ops.log(z + ops.sqrt(ops.square(z) - 1 + 1e-5))

    def inside(self, x):
        norm = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)
        return x / ops.maximum(norm, 1.0) * (1 - 1e-4)


@case(
    data=vectors(),
    culprits=frozenset({"distance"}),
    kind="forward_overflow",
    direction="forward",
    decoy="embedding",
    optimizer=lambda: keras.optimizers.Adam(0.005),
)
def poincare_distance():
    """Two points at the border are 1e8 apart before the logarithm."""
    inputs = keras.Input((32,))
    x = layers.Dense(8, name="embedding")(inputs)
    return keras.Model(inputs, head(PoincareDistance(16, name="distance")(x)))


class GeometricMean(layers.Layer):
    """The root of the product over the parts of each group."""

    def call(self, inputs):
        x = ops.maximum(inputs["probabilities"], 1e-3)
        return {"scores": ops.prod(x, axis=1) ** (1.0 / x.shape[1])}


@case(
    data=vectors(),
    culprits=frozenset({"mean"}),
    kind="underflow",
    direction="forward",
    decoy="votes",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def geometric_mean():
    """The votes of 12 experts: 0.2 ** 12 is 0, and its root has no slope."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Reshape((12, 4))(layers.Dense(48, name="votes")(x))
    x = layers.Softmax(name="probabilities")(x)
    x = GeometricMean(name="mean")({"probabilities": x})["scores"]
    return keras.Model(inputs, head(x))


class GaussianLikelihood(layers.Layer):
    """Adds the negative log-likelihood of a normal distribution."""

    def call(self, inputs):
        mean, log_variance, y = inputs
        squares = ops.square(y - mean) * ops.exp(-log_variance)
        self.add_loss(float32_loss(ops.mean(squares + log_variance) / 2))
        return mean


def durations():
    """Durations of some thousand seconds, an input beside the features."""
    x, _ = vectors(features=16)()
    random = np.random.default_rng(1)
    y = 2000.0 + 300.0 * x @ random.normal(size=(16, 1))
    y += random.normal(0.0, 100.0, size=y.shape)
    return (x, y.astype("float32")), np.zeros((len(x), 1), "float32")


@case(
    data=durations,
    culprits=frozenset({"likelihood"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    loss=lambda y_true, y_pred: 0.0 * keras.ops.mean(y_pred, axis=-1),
    metric="loss",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def gaussian_likelihood():
    """The square of an error of 500 is too large before it is divided."""
    inputs, y = keras.Input((16,)), keras.Input((1,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    mean = layers.Dense(
        1, bias_initializer=keras.initializers.Constant(2000.0), name="mean"
    )(x)
    log_variance = layers.Dense(
        1, bias_initializer=keras.initializers.Constant(12.0), name="variance"
    )(x)
    mean = GaussianLikelihood(name="likelihood")([mean, log_variance, y])
    return keras.Model([inputs, y], layers.Identity(dtype="float32")(mean))


class SumCell(layers.Layer):
    """Attention in linear time as a recurrence: two sums, and their ratio."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.state_size = [units, units]
        self.output_size = units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 2 * self.units))

    def call(self, x, states):
        top, bottom = states
        key, value = ops.split(ops.matmul(x, self.kernel), 2, axis=-1)
        weight = ops.exp(key + 7.0)
        top, bottom = top + weight * value, bottom + weight
        return top / bottom, [top, bottom]


def long_sentences(samples=128, length=64):
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(size=(samples, length, 8))
    x[..., :4] += np.eye(4)[y][:, None] * 3.0
    return x.astype("float32"), y


@case(
    data=long_sentences,
    culprits=frozenset({"rnn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def recurrent_sums():
    """A cell of one's own: both sums grow with the sentence."""
    inputs = keras.Input((64, 8))
    x = layers.RNN(SumCell(16), name="rnn")(inputs)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


class InverseSoftplus(layers.Layer):
    """What softplus makes the input of."""

    def call(self, x):
        return ops.log(ops.exp(x) - 1.0)


def lifetimes():
    """Lifetimes of up to 30 hours, the longer the higher the class."""
    random = np.random.default_rng(0)
    x = random.uniform(0.5, 30.0, size=(512, 4)).astype("float32")
    return x, np.argmax(x, axis=-1).astype("int32")


@case(
    data=lifetimes,
    culprits=frozenset({"inverse"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def inverse_softplus():
    """The logarithm of an exponential that is infinite."""
    inputs = keras.Input((4,))
    x = InverseSoftplus(name="inverse")(inputs)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))
