"""Functions of single numbers, of distances and of random ones."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, vectors
from zoo.parts import (
    Own,
    before_mlp,
    behind_dense,
    chain,
    classifier,
    dense,
    head,
    normal,
    relu,
    row,
)


@dataset
def with_large(_):
    x, y = vectors()()
    x[::16, 0] = -30.0
    return x, y


class Gate(layers.Layer):
    """Adds the entropy of a sigmoid gate as a feature."""

    def call(self, x):
        p = ops.sigmoid(x)
        entropy = -p * ops.log(p + 1e-8)
        return ops.concatenate([x, entropy], axis=-1)


@case(with_large())
def entropy_log():
    return before_mlp(Gate(name="gate"))


@dataset
def lifetimes(random):
    """Lifetimes of up to 30 hours, the longer the higher the class."""
    x = random.uniform(0.5, 30.0, size=(512, 4)).astype("float32")
    return x, np.argmax(x, axis=-1)


class InverseSoftplus(layers.Layer):
    """The inverse of softplus."""

    def call(self, x):
        return ops.log(ops.exp(x) - 1.0)


@case(lifetimes())
def inverse_softplus():
    """The logarithm of an exponential that is infinite."""
    hidden = layers.Dense(32, "relu", name="h1")
    return classifier((4,), InverseSoftplus(name="inverse"), hidden)


def named(function, name, width=32):
    """A layer that computes a function."""
    return layers.Lambda(function, output_shape=(width,), name=name)


@case(vectors(scale=6.0))
def clipped_exponential():
    """An infinite rate is clipped, but its gradient is 0 * infinity."""
    rate = named(lambda x: ops.minimum(ops.exp(x), 1e4), "rate")
    first, last = dense(32, name="h1"), dense(4, name="head")
    return chain((32,), first, rate, named(ops.log1p, "log"), last)


class Ratio(layers.Layer):
    """a / (b + 1e-3), whose gradient is -a / b / b."""

    def call(self, inputs):
        a, b = ops.split(inputs, 2, axis=-1)
        return a / (ops.relu(b) + 1e-3)


@case(vectors())
def ratio_collapse():
    """On torch, whose derivative of max(b, 0) selects zeros rather than
    multiplying by them, it takes a very small b.
    """
    parts = Ratio(name="ratio"), layers.LayerNormalization(name="ln")
    return classifier((32,), dense(64, name="h1"), *parts)


class Logit(layers.Layer):
    """The log-odds of a probability, over a temperature."""

    def call(self, p):
        return ops.log(p / (1.0 - p)) / 3.0


@case(vectors(scale=2.2))
def calibrated_experts():
    """Probabilities of 0.9999 are 1, whose log-odds are infinite."""
    experts = layers.Activation("sigmoid", name="experts"), Logit(name="logit")
    return behind_dense(*experts, hidden=dense(16, name="h1"))


class Square(layers.Layer):
    def call(self, x):
        return ops.square(ops.relu(x))


@case(vectors())
def saturated_square():
    """Squared ReLUs: what saturates behind them hides the infinity."""
    first = dense(64, kernel_initializer=normal(25.0), name="h1")
    small = keras.initializers.RandomUniform(0.0, 3e-6, seed=1)
    last = {"trainable": False, "name": "saturating"}
    last = dense(32, "tanh", False, small, **last)
    norm = layers.BatchNormalization(name="bn")
    return classifier((32,), first, Square(name="square"), last, norm)


class FarSquares(layers.Layer):
    """Squares, but of what is near only."""

    def call(self, x):
        return ops.where(ops.abs(x) < 10.0, x * x, 100.0)


@case(vectors())
def sound_where():
    """Squares of 1,000 are infinite, and replaced, and have no gradient."""
    inputs = keras.Input((32,))
    wide = layers.Rescaling(300.0, name="wide"), FarSquares(name="near")
    x = row(inputs, *wide, relu(32, "h1"))
    y = layers.Dense(32, "relu", name="h2")(inputs)
    x = layers.Concatenate(name="both")([0.01 * x, y])
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


@case(vectors(scale=20.0))
def sound_clipped_cube():
    """A cube of 60 is infinite, and clipped to what float16 holds."""
    cube = named(lambda x: ops.clip(x * x * x, -1000.0, 1000.0), "cube")
    small = layers.Rescaling(1e-3, name="small")
    return chain((32,), cube, small, relu(32, "h1"), dense(4, name="head"))


class SaturatedGate(layers.Layer):
    """x sigmoid(g), whose gates are zero in float16 and 1e-9 in float32."""

    def build(self, input_shape):
        far = keras.initializers.RandomUniform(-40, 40, 1)
        self.gate = layers.Dense(32, bias_initializer=far)
        self.gate.build(input_shape)

    def call(self, x):
        return x * ops.sigmoid(self.gate(x))


@case(vectors(features=32))
def healthy_saturated_gate():
    """Like entropy_log: half of the gates vanish; nothing divides by them."""
    return before_mlp(SaturatedGate())


class ClippedLog(layers.Layer):
    """Logarithms of probabilities, clipped at one thousandth."""

    def call(self, p):
        return ops.log(ops.clip(p, 1e-3, 1.0))


@case(vectors(scale=3.0))
def healthy_clipped_log():
    """Probabilities of exp(-30) are 0, and clipped in either dtype."""
    parts = layers.Softmax(name="softmax"), ClippedLog(name="log")
    return behind_dense(*parts, hidden=dense(8, name="h1"))


class Rounded(layers.Layer):
    """Rounds to eighths, passing gradients straight through."""

    def call(self, x):
        x = ops.clip(x, -1.0, 1.0)
        return x + ops.stop_gradient(ops.round(8 * x) / 8 - x)


@case(vectors())
def healthy_quantized():
    """Values half between two levels are rounded to the other one."""
    return classifier((32,), *[dense(64, "tanh"), Rounded] * 2)


class GumbelGate(Own):
    """Softmax of logits with Gumbel noise of rounded uniform numbers."""

    def call(self, x):
        uniform = keras.random.uniform(ops.shape(x), seed=self.seeds)
        uniform = ops.cast(uniform, x.dtype)
        noise = -ops.log(-ops.log(uniform + 1e-20) + 1e-20)
        return x * ops.softmax(0.1 * (x + noise))


@case(vectors())
def gumbel_noise():
    """Gumbel softmaxes: one draw in 4096 rounds to 1."""
    gate, scale = GumbelGate("gumbel", seed=1), layers.Rescaling(100.0)
    return classifier((32,), relu(512, "wide"), gate, scale, relu(32, "h1"))


class ClippedGumbel(Own):
    """Gumbel noise of uniform numbers that are drawn in float16 and clipped."""

    def call(self, x):
        u = keras.random.uniform(ops.shape(x), dtype=x.dtype, seed=self.seeds)
        noise = -ops.log(-ops.log(ops.clip(u, 1e-3, 1 - 1e-3)))
        return x * ops.softmax(0.1 * (x + noise)) * x.shape[-1]


@case(vectors())
def healthy_gumbel():
    """Other draws than float32's, of the same distribution."""
    return classifier((32,), relu(64), ClippedGumbel(seed=1))


@dataset
def near_and_far(random):
    """Pairs that are near to each other or not, every fourth of them equal."""
    y = random.integers(0, 2, 512)
    y[::4] = 1
    a, b = random.normal(size=(2, 512, 16)).astype("float32")
    near = a + 0.3 * random.normal(size=a.shape).astype("float32")
    near[::4] = a[::4]
    return (a, np.where(y[:, None] == 1, near, b)), y


class Angle(layers.Layer):
    """The angle between two vectors, kept off 0 and pi by 1e-6."""

    def call(self, inputs):
        a, b = (x / ops.norm(x, axis=-1, keepdims=True) for x in inputs)
        cosine = ops.sum(a * b, axis=-1, keepdims=True)
        return ops.arccos(ops.clip(cosine, -1, 1) * (1 - 1e-6))


@case(near_and_far())
def angle_of_equals():
    """Arccos of a cosine: 1 - 1e-6 is 1, where its slope ends."""
    inputs = keras.Input((16,)), keras.Input((16,))
    embed = layers.Dense(8, name="embedding")
    x = row([embed(x) for x in inputs], Angle(name="angle"), relu(16, "h1"))
    return keras.Model(inputs, head(x, 2))


@dataset
def clusters(random):
    y = random.integers(0, 4, 512)
    x = 40 + random.normal(size=(4, 16))[y]
    return (x + 0.3 * random.normal(size=x.shape)), y


class Prototypes(layers.Layer):
    """-|x - c|^2 as x^2 + c^2 - 2 x c, to a prototype of each class."""

    def build(self, input_shape):
        start = keras.initializers.RandomNormal(40.0, 0.5, seed=1)
        self.centres = self.add_weight((4, input_shape[-1]), start)

    def call(self, x):
        square = ops.sum(x * x, axis=-1, keepdims=True)
        squares = ops.sum(self.centres * self.centres, axis=-1)
        product = ops.matmul(x, ops.transpose(self.centres))
        return (2 * product - square - squares) / 4


@case(clusters())
def pairwise_cancellation():
    """Metric learning: distances by the binomial formula cancel."""
    first = dense(16, kernel_initializer="identity", name="h1")
    return chain((16,), first, Prototypes(name="prototypes"))


class KernelRegression(layers.Layer):
    """The mean of values, weighted by a Gaussian of distances to keys."""

    def build(self, input_shape):
        self.keys = self.add_weight((32, input_shape[-1]), normal(1.0))
        self.values = self.add_weight((32, 16))

    def call(self, x):
        apart = ops.sum(ops.square(x[:, None] - self.keys), axis=-1)
        kernel = ops.exp(-apart / 2)
        kernel = kernel / ops.sum(kernel, axis=-1, keepdims=True)
        return ops.matmul(kernel, self.values)


@case(vectors(features=16))
def kernel_regression():
    """All 32 keys are so far that each Gaussian of them is 0."""
    kernel = KernelRegression(name="kernel")
    gain, hidden = layers.Rescaling(4.0, name="gain"), relu(32, "h1")
    return classifier((16,), dense(32, name="embed"), kernel, gain, hidden)


class RadialBasis(Own):
    """How near each of some centres is; most are too far to count."""

    def build(self, shape):
        near = keras.initializers.RandomUniform(-self.size, self.size, seed=1)
        self.centres = self.add_weight((self.count, shape[-1]), near)

    def call(self, x):
        apart = ops.sum(ops.square(x[:, None] - self.centres), axis=-1)
        return ops.exp(-apart)


@case(vectors(features=2, scale=1.5))
def sound_radial_basis():
    """exp(-30) is 0 in float16, and as good as 0 in float32."""
    near = RadialBasis("near", count=24, size=3)
    return chain((2,), near, dense(4, name="head"))


@dataset
def padded_points(random, samples=256, count=16):
    """Clouds about one of four centres; what is missing is at 1000."""
    y = random.integers(0, 4, samples)
    centres = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]])
    x = random.normal(0.0, 0.7, size=(samples, count, 3))
    x += centres[y][:, None]
    number = random.integers(4, count, samples)
    x[np.arange(count) >= number[:, None]] = 1000.0
    return x, y


class Chamfer(layers.Layer):
    """Squared distances from points to the nearest of some, with padding."""

    def build(self, input_shape):
        self.points = self.add_weight((12, 3), "normal")

    def call(self, x):
        apart = ops.square(x[:, :, None] - self.points[None, None])
        return ops.min(ops.sum(apart, axis=-1), axis=1)


@case(padded_points())
def healthy_chamfer():
    """Distances to padding are infinite, and never the smallest."""
    return classifier((16, 3), Chamfer(name="chamfer"), relu(32, "h1"))


@dataset
def few_shots(random, samples=256):
    w = random.normal(size=(samples, 4, 1))
    mix = random.normal(size=(4, 8))
    a, b = random.normal(size=(2, samples, 10, 4))
    return (np.tanh(a @ mix), a @ w, np.tanh(b @ mix)), b @ w


class Ridge(layers.Layer):
    """Linear regression on a few examples, and what it predicts."""

    def call(self, inputs):
        support, known, query = inputs
        turned = ops.transpose(support, (0, 2, 1))
        normal = ops.matmul(turned, support)
        normal = normal + 0.1 * ops.eye(support.shape[-1], dtype=normal.dtype)
        weights = ops.solve(normal, ops.matmul(turned, known))
        return ops.matmul(query, weights)


@case(few_shots())
def regression_on_few_examples():
    """A head that solves equations, which no backend does in float16.

    XLA solves it: 0.676 after 30 epochs, 0.669 in float32.
    """
    support, query, known = (keras.Input((10, n)) for n in (8, 8, 1))
    features = layers.Dense(8, name="features")
    x = Ridge(name="ridge")([features(support), known, features(query)])
    return keras.Model([support, known, query], x)
