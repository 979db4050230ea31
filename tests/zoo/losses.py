"""Losses that layers add or that a model's `compute_loss` computes.

They have the dtype of the layer that puts out what they are of.
"""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, targets, vectors
from zoo.parts import (
    Own,
    before_mlp,
    behind_dense,
    chain,
    classifier,
    constant,
    conv,
    dense,
    float32_loss,
    normal,
    relu,
    row,
)


class OwnLoss(keras.Model):
    """A model whose `compute_loss` is a function of targets and outputs."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = self.own_loss(ops.cast(y, y_pred.dtype), y_pred)
        return ops.cast(loss, "float32")


def nothing(y_true, y_pred):
    """The loss of outputs that no targets belong to."""
    return 0.0 * ops.mean(y_pred, axis=-1)


class Sampling(Own):
    """Draws a latent and adds mean^2 + var - log(var + 1e-8) - 1."""

    def call(self, x):
        mean, raw = x[:, :16], x[:, 16:]
        std = ops.softplus(raw - 9.0)
        variance = ops.square(std)
        kl = ops.square(mean) + variance - ops.log(variance + 1e-8) - 1
        self.add_loss(float32_loss(ops.mean(kl), 1e-3))
        return mean + std * self.normal(mean)


@case(vectors())
def latent_variance():
    """Variational encoders whose posterior gets narrow."""
    latent, sampling = dense(32, name="latent"), Sampling("sampling", seed=1)
    return classifier((32,), relu(64, "h1"), latent, sampling)


class Spread(Own):
    """Adds the mean of exp(-distance) of all pairs of rows."""

    def call(self, x):
        squares = ops.sum(ops.square(x[:, None] - x[None]), axis=-1)
        distances = ops.sqrt(squares + self.epsilon)
        self.add_loss(float32_loss(ops.mean(ops.exp(-distances))))
        return x


@case(vectors())
def distance_to_itself():
    """Triplet losses: sqrt(0 + 1e-12) has no slope in float16."""
    spread = Spread("spread", epsilon=1e-12)
    return classifier((32,), relu(64, "h1"), dense(8, name="embedding"), spread)


@case(vectors())
def healthy_distances():
    """The epsilon under the root is a number in float16."""
    return classifier((32,), relu(64), dense(8), Spread(epsilon=1e-4))


class Penalized(layers.Layer):
    """A dense layer that adds the sum of its squared weights to the loss."""

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], 64), normal(8.0))

    def call(self, x):
        penalty = ops.sum(ops.square(self.kernel))
        self.add_loss(float32_loss(penalty, 1e-6))
        return ops.tanh(ops.matmul(x, self.kernel) / 64)


@case(vectors())
def weight_penalty():
    """Penalties written by hand: what it puts out is fine."""
    return before_mlp(Penalized(name="penalized"))


class Decorrelated(layers.Layer):
    """A projection that adds the norm of its weights to the loss."""

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], 512), normal(3.0))

    def call(self, x):
        penalty = ops.sum(self.kernel * self.kernel)
        self.add_loss(float32_loss(ops.sqrt(penalty), 1e-3))
        return ops.matmul(x, self.kernel) / 100


@case(vectors())
def weight_penalty_in_call():
    """Weight penalties in `call`, where weights are cast to float16."""
    return before_mlp(Decorrelated(name="penalized"))


class SumOfSquares(keras.regularizers.Regularizer):
    """A small part of the sum of squares, as a float32 number."""

    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return float32_loss(ops.sum(ops.square(x)), self.part)


@case(vectors(samples=1024))
def activity_penalty():
    """Large batches: the sum runs over 512 rows of 256 units."""
    given = {"activity_regularizer": SumOfSquares(1e-6), "name": "wide"}
    wide = layers.Dense(256, "relu", kernel_initializer="he_normal", **given)
    return classifier((32,), wide, layers.Dense(16, "relu", name="h1"))


@case(vectors(scale=20.0))
def squared_activity_penalty():
    """Sparse autoencoders: the penalty sums squares over the batch, so that
    the loss is not finite, while its gradients are.
    """
    first = relu(64, "h1", activity_regularizer=SumOfSquares(1e-9))
    return classifier((32,), first, relu(32, "h2"))


class TinyPenalty(layers.Layer):
    """Adds a ten-millionth of the mean square of what passes."""

    def call(self, x):
        self.add_loss(float32_loss(1e-7 * ops.mean(ops.square(x))))
        return x


@case(vectors())
def healthy_tiny_penalty():
    """A loss that float16 makes 0, and that would change nothing."""
    return behind_dense(TinyPenalty(name="penalty"), hidden=relu(64, "h1"))


class Sinkhorn(layers.Layer):
    """Prototypes and their balanced assignment, which is to be predicted."""

    def build(self, input_shape):
        self.prototypes = self.add_weight((input_shape[-1], 8))

    def call(self, x):
        x = x / (ops.norm(x, axis=-1, keepdims=True) + 1e-3)
        prototypes = self.prototypes / ops.norm(self.prototypes, axis=0)
        scores = ops.matmul(x, prototypes)
        q = ops.exp(ops.stop_gradient(scores) / 0.05)
        for _ in range(3):
            q = q / ops.sum(q, axis=0, keepdims=True)
            q = q / ops.sum(q, axis=1, keepdims=True)
        loss = -ops.mean(ops.sum(q * ops.log_softmax(scores / 0.1), axis=-1))
        self.add_loss(float32_loss(loss, 0.1))
        return scores


@case(vectors())
def balanced_assignment():
    """Clustering: the exponential of a cosine by 0.05."""
    last = dense(4, name="embedding"), Sinkhorn(name="sinkhorn")
    return classifier((32,), relu(64, "h1"), *last)


@dataset(seed=1)
def durations(random):
    """Durations of some thousand seconds, an input beside the features."""
    x, _ = vectors(features=16)()
    y = 2000.0 + 300.0 * x @ random.normal(size=(16, 1))
    y += random.normal(0.0, 100.0, size=y.shape)
    return (x, y), np.zeros((len(x), 1))


class GaussianLikelihood(layers.Layer):
    """Adds the negative log-likelihood of a normal distribution."""

    def call(self, inputs):
        mean, log_variance, y = inputs
        squares = ops.square(y - mean) * ops.exp(-log_variance)
        self.add_loss(float32_loss(ops.mean(squares + log_variance) / 2))
        return mean


@case(durations(), loss=nothing)
def gaussian_likelihood():
    """The square of an error of 500 is too large before it is divided."""
    inputs = keras.Input((16,)), keras.Input((1,))
    x = layers.Dense(32, "relu", name="h1")(inputs[0])
    heads = {"mean": 2000.0, "variance": 12.0}
    x = [
        layers.Dense(1, bias_initializer=constant(bias), name=name)(x)
        for name, bias in heads.items()
    ]
    mean = GaussianLikelihood(name="likelihood")([*x, inputs[1]])
    return keras.Model(inputs, layers.Identity(dtype="float32")(mean))


@dataset
def wide_vectors(_):
    x, _ = vectors()()
    return x * 4, x


class KLDivergence(layers.Layer):
    """Adds -0.5 mean(1 + logvar - mean^2 - exp(logvar)) to the loss."""

    def call(self, inputs):
        mean, logvar = inputs
        kl = 1 + logvar - ops.square(mean) - ops.exp(logvar)
        self.add_loss(float32_loss(-ops.mean(kl), 1e-6))
        return mean


@case(wide_vectors())
def vae():
    inputs = keras.Input((32,))
    x = layers.Dense(32, "tanh", name="encoder")(inputs)
    mean = layers.Dense(8, name="mean")(x)
    logvar = layers.Dense(8, name="logvar", bias_initializer=constant(11.5))(x)
    x = KLDivergence(name="kl")([mean, logvar])
    return keras.Model(inputs, layers.Dense(32, dtype="float32")(x))


class Code(Own):
    """Draws a code, and adds the mean of its divergence."""

    def call(self, inputs):
        mean, log_variance = inputs
        divergence = ops.square(mean) + ops.exp(log_variance)
        divergence = divergence - 1.0 - log_variance
        divergence = ops.mean(divergence)
        self.add_loss(0.01 * ops.cast(divergence, "float32"))
        return mean + ops.exp(0.5 * log_variance) * self.normal(mean)


@dataset
def rebuilt(_, scale):
    x, _ = vectors(1024, features=16, scale=scale)()
    return x, x


def rebuilding(code, units, **log_variance):
    """Returns an autoencoder with a code of a mean and a variance."""
    inputs = keras.Input((16,))
    mean = layers.Dense(units, name="mean")(inputs)
    variance = layers.Dense(units, name="log_variance", **log_variance)(inputs)
    x = code([mean, variance])
    return keras.Model(inputs, layers.Dense(16, name="rebuild")(x))


@case(rebuilt(1.0))
def sound_reparameterization():
    """A variational autoencoder with a mean instead of a sum."""
    return rebuilding(Code("code", seed=3), 8)


class Sample(Own):
    """Draws a code whose divergence, summed, shall be a given one."""

    def call(self, inputs):
        mean, log_variance = inputs
        variance = ops.exp(log_variance)
        divergence = ops.square(mean) + variance - 1.0 - log_variance
        excess = 1e-4 * ops.sum(divergence) - 0.5
        self.add_loss(float32_loss(ops.square(excess)))
        return mean + ops.sqrt(variance) * self.normal(mean)


@case(rebuilt(6.0))
def divergence_of_a_batch():
    """add_loss with a sum over 512 rows, made small only afterwards."""
    code = Sample("code", seed=3)
    return rebuilding(code, 16, kernel_initializer="zeros")


class ImportanceBound(Own):
    """Adds the bound of eight samples: the mean of their densities."""

    def call(self, inputs):
        mean, x = inputs
        noise = keras.random.normal(
            (8, *ops.shape(mean)), dtype=mean.dtype, seed=self.seeds
        )
        z = mean + 0.1 * noise
        error = ops.square(self.decode(z) - x)
        density = ops.exp(-0.5 * ops.sum(error, axis=-1))
        bound = -ops.log(ops.mean(density, axis=0) + 1e-30)
        self.add_loss(ops.mean(bound))
        return mean


@case(rebuilt(1.3))
def importance_weighted_bound():
    """Densities of e**-20 are 0 in float16, and so is their mean."""
    inputs = keras.Input((16,))
    x = layers.Dense(16, name="mean")(inputs)
    decode = layers.Dense(16, name="decode")
    bound = ImportanceBound("bound", seed=5, decode=decode)
    return keras.Model(inputs, bound([x, inputs]))


@dataset
def ranked(random, samples=1024):
    x = random.normal(size=(samples, 16)).astype("float32")
    y = x @ random.normal(size=(16, 1))
    return (x, y), np.zeros((samples, 1))


class PairwiseHinge(layers.Layer):
    """Adds a loss over all pairs whose order is known."""

    def call(self, inputs):
        scores, relevance = inputs
        apart = scores - ops.transpose(scores)
        pairs = relevance > ops.transpose(relevance)
        pairs = ops.cast(pairs, scores.dtype)
        hinge = ops.relu(1.0 - apart) * pairs
        self.add_loss(ops.sum(hinge) / (ops.sum(pairs) + 1.0))
        return scores


@case(ranked())
def pairs_of_a_batch():
    """A ranking loss: 130,000 pairs are added up and counted."""
    inputs = keras.Input((16,)), keras.Input((1,))
    x = row(inputs[0], relu(16, "h1"), dense(1, name="score"))
    x = PairwiseHinge(name="ranking")([x, inputs[1]])
    return keras.Model(inputs, x)


@dataset(seed=1)
def boxes(random, samples=256):
    """Features of pictures of 640 pixels, and corners of boxes in them."""
    x, _ = vectors(samples=samples, features=16)()
    z = np.tanh(0.5 * x @ random.normal(size=(16, 4)))
    corner = 100.0 + 80.0 * z[:, :2]
    size = 400.0 + 80.0 * z[:, 2:]
    true = np.concatenate([corner, corner + size], axis=-1)
    return (x, true), np.zeros((samples, 4))


class BoxOverlap(Own):
    """Adds 1 less the overlap of boxes as a loss, in pixels or in parts."""

    def call(self, inputs):
        found, true = inputs
        if self.pixels > 1:
            true = true / self.pixels
        corner = found[:, :2] + ops.relu(found[:, 2:]) + self.least
        found = ops.concatenate([found[:, :2], corner], -1)
        low = ops.maximum(found[:, :2], true[:, :2])
        high = ops.minimum(found[:, 2:], true[:, 2:])
        both = ops.prod(ops.relu(high - low), axis=-1)
        one = ops.prod(found[:, 2:] - found[:, :2], axis=-1)
        other = ops.prod(true[:, 2:] - true[:, :2], axis=-1)
        overlap = both / (one + other - both + self.epsilon)
        self.add_loss(float32_loss(ops.mean(1.0 - overlap)))
        return found


def detector(overlap, units):
    """Returns a model of boxes that a layer rescales to some units."""
    inputs = keras.Input((16,)), keras.Input((4,))
    x = row(inputs[0], relu(32, "h1"), dense(4, name="box"), units)
    x = overlap([x, inputs[1]])
    return keras.Model(inputs, layers.Identity(dtype="float32", name="out")(x))


@case(boxes(), loss=nothing)
def box_overlap():
    """The area of a box of 400 by 400 pixels is infinite."""
    overlap = BoxOverlap("overlap", pixels=1, least=1.0, epsilon=0.0)
    offset = [100.0, 100.0, 400.0, 400.0]
    return detector(overlap, layers.Rescaling(80.0, offset, name="pixels"))


@case(boxes(), loss=nothing)
def healthy_box_overlap():
    """Areas of a third of the picture; the epsilon is not needed."""
    overlap = BoxOverlap("overlap", pixels=640.0, least=0.01, epsilon=1e-9)
    offset = [0.15, 0.15, 0.6, 0.6]
    return detector(overlap, layers.Rescaling(0.125, offset, name="parts"))


class ConcreteDropout(Own):
    """Dropout with a learned rate, every logarithm with an epsilon of 1e-7."""

    def build(self, input_shape):
        self.rate = self.add_weight((), constant(-2.0))

    def call(self, x, training=False):
        p = ops.sigmoid(self.rate)
        entropy = p * ops.log(p + 1e-7) + (1 - p) * ops.log(1 - p + 1e-7)
        self.add_loss(float32_loss(entropy, 1e-3))
        if not training:
            return x
        u = keras.random.uniform(ops.shape(x), dtype=x.dtype, seed=self.seeds)
        logit = ops.log(p + 1e-7) - ops.log(1 - p + 1e-7)
        logit = logit + ops.log(u + 1e-7) - ops.log(1 - u + 1e-7)
        return x * (1 - ops.sigmoid(10 * logit)) / (1 - p)


@case(vectors())
def healthy_concrete_dropout():
    """1e-7 is a number in float16, and a uniform one of 0 a kept unit."""
    return classifier((32,), relu(128), ConcreteDropout(seed=1))


class Codebook(layers.Layer):
    """Nearest code, passed straight through, with the commitment as a loss."""

    def build(self, input_shape):
        self.codes = self.add_weight((32, input_shape[-1]), "random_normal")

    def call(self, x):
        differences = x[:, None] - self.codes
        distances = ops.sum(ops.square(differences), axis=-1)
        code = ops.take(self.codes, ops.argmin(distances, axis=-1), axis=0)
        commitment = ops.mean(ops.square(x - ops.stop_gradient(code)))
        follow = ops.mean(ops.square(code - ops.stop_gradient(x)))
        self.add_loss(float32_loss(follow + 0.25 * commitment))
        return x + ops.stop_gradient(code - x)


@case(vectors())
def healthy_codebook():
    """Vectors between two codes take the other one."""
    return classifier((32,), relu(64), dense(4, "tanh"), Codebook())


@dataset
def masks(random, samples=128, size=48):
    """Images and where they are bright, which is nearly everywhere."""
    x = random.normal(size=(samples, size, size, 1)) + 1.3
    return x, 1.0 * (x > 0)


def dice(y_true, y_pred):
    both = ops.sum(y_true * y_pred)
    return 1 - 2 * both / (ops.sum(y_true) + ops.sum(y_pred) + 1)


@case(masks(), loss=dice)
def healthy_dice():
    """Keras computes what `compile` is given in float32: the sums fit.

    TensorFlow sums the gradient of the bias over 73,728 numbers in float16:
    44% off, which training stands. JAX does so in both layers: 44% and 50%.
    """
    last = conv(1, 1, activation="sigmoid")
    return chain((48, 48, 1), conv(4, 1, activation="tanh"), last)


class Dice(OwnLoss):
    own_loss = staticmethod(dice)


@case(masks())
def dice_over_batch():
    """Segmentation: 64 masks of 48 x 48 have too many pixels.

    TensorFlow sums the gradient of the first kernel over 147,456 pixels in
    float16: 54% off one in float64, which Adam bears and SGD does not.
    """
    first = conv(4, 1, activation="tanh", name="conv")
    last = conv(1, 1, activation="sigmoid", name="mask")
    return chain((48, 48, 1), first, last, kind=Dice)


class Contrastive(OwnLoss):
    def own_loss(self, y, y_pred):
        left, right = ops.split(y_pred, 2, axis=-1)
        similar = ops.exp(ops.matmul(left, ops.transpose(right)) / 0.05)
        right_one = ops.sum(similar * ops.eye(32, dtype=similar.dtype), axis=-1)
        return ops.mean(ops.log(ops.sum(similar, axis=-1)) - ops.log(right_one))


@dataset
def views(random):
    a = random.normal(size=(512, 16))
    b = a + 0.3 * random.normal(size=a.shape)
    return (a, b), np.zeros(512)


@case(views())
def contrastive_temperature():
    """InfoNCE: exp(1 / 0.05), outside of every layer."""
    inputs = keras.Input((16,)), keras.Input((16,))
    left, right = (layers.Dense(16, name=n) for n in ("left", "right"))
    sides = {"left": left(inputs[0]), "right": right(inputs[1])}
    pair = [
        layers.UnitNormalization(name=f"unit_{n}", dtype="float32")(x)
        for n, x in sides.items()
    ]
    return Contrastive(inputs, layers.Concatenate(name="pair")(pair))


class MixtureDensity(OwnLoss):
    def own_loss(self, y, y_pred):
        weight, mean, log_std = ops.split(y_pred, 3, axis=-1)
        z = (y - mean) * ops.exp(-log_std)
        density = ops.exp(-0.5 * ops.square(z) - log_std)
        total = ops.sum(ops.softmax(weight) * density, axis=-1)
        return -ops.mean(ops.log(total + 1e-10))


@dataset
def with_outliers(_):
    x, y = targets()()
    y[::16] += 100
    return x, y


@case(with_outliers())
def mixture_density():
    """Mixture density networks: log(exp(-18) + 1e-10)."""
    mixture = dense(12, name="mixture")
    return chain((32,), relu(64, "h1"), mixture, kind=MixtureDensity)


class LogCosh(OwnLoss):
    def own_loss(self, y, y_pred):
        return ops.mean(ops.log(ops.cosh(y - y_pred)))


@dataset
def far_targets(_):
    x, y = targets()()
    return x, y + 20


@case(far_targets())
def log_cosh():
    """Robust regression: cosh(12) overflows, its log is 11."""
    return chain((32,), relu(64, "h1"), dense(1, name="price"), kind=LogCosh)


class FocalProbabilities(OwnLoss):
    def own_loss(self, y, y_pred):
        right = ops.sum(y * y_pred, axis=-1)
        focus = ops.square(1 - right)
        return -ops.mean(focus * ops.log(right + 1e-9))


@dataset
def wrong_labels(_):
    """Every 16th is far out and labelled wrong, and a float32 run bears it."""
    x, y = vectors()()
    x[::16] *= 5
    y[::16] = (y[::16] + 1) % 4
    return x, np.eye(4, dtype="float32")[y]


@case(wrong_labels())
def focal_probabilities():
    """Focal losses of probabilities: log(0 + 1e-9) is infinite."""
    logits = dense(4, kernel_initializer=normal(1.0), name="logits")
    parts = relu(64, "h1"), logits, layers.Softmax(name="probabilities")
    return chain((32,), *parts, kind=FocalProbabilities)


class Cox(OwnLoss):
    """The partial likelihood: each death against all who lived then."""

    def own_loss(self, y, y_pred):
        at_risk = ops.cumsum(ops.exp(y_pred), axis=0)
        likelihood = ops.cast(y_pred - ops.log(at_risk), "float32")
        y = ops.cast(y, "float32")
        return -ops.sum(y * likelihood) / ops.sum(y)


@dataset
def survival(random, scale, samples=2048, features=16):
    """Patients, sorted from the longest survival to the shortest."""
    x = random.normal(size=(samples, features)).astype("float32")
    risk = x @ random.normal(size=features) / 2
    time = random.exponential(size=samples) * np.exp(-risk)
    order = np.argsort(-time)
    event = (random.random(samples) < 0.7).astype("float32")
    return x[order] * np.float32(scale), event[order, None]


@case(survival(12.0))
def cox_regression():
    """The risks of 2,048 patients are summed before the logarithm."""
    return chain((16,), relu(16, "h1"), dense(1, name="risk"), kind=Cox)


class StableCox(OwnLoss):
    """The partial likelihood, from logarithms of sums in float32."""

    def own_loss(self, y, y_pred):
        score, y = ops.cast(y_pred, "float32"), ops.cast(y, "float32")
        largest = ops.stop_gradient(ops.max(score))
        at_risk = ops.cumsum(ops.exp(score - largest), axis=0)
        at_risk = ops.log(at_risk + 1e-30) + largest
        return -ops.sum(y * (score - at_risk)) / ops.sum(y)


@case(survival(1.0))
def sound_cox():
    """The risks of 2,048 patients, summed in float32."""
    return chain((16,), relu(32, "h1"), dense(1, name="head"), kind=StableCox)


class Similarity(OwnLoss):
    """One minus the structural similarity, of bytes."""

    def own_loss(self, y, y_pred):
        axes = (1, 2, 3)
        a = ops.mean(y, axes, keepdims=True)
        b = ops.mean(y_pred, axes, keepdims=True)
        spread = ops.mean((y - a) ** 2 + (y_pred - b) ** 2, axes)
        both = ops.mean((y - a) * (y_pred - b), axes)
        a, b = ops.squeeze(a, axes), ops.squeeze(b, axes)
        c, d = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        similar = (2 * a * b + c) / (a**2 + b**2 + c)
        similar = similar * (2 * both + d) / (spread + d)
        return 1.0 - ops.mean(ops.cast(similar, "float32"))


@dataset
def bright_pictures(random, samples=256):
    """Pictures of a gradient, bytes about 230."""
    slope = random.normal(size=(samples, 2, 1, 1))
    place = np.linspace(-1, 1, 12)
    x = slope[:, 0] * place + slope[:, 1] * place[:, None]
    x = np.clip(235 + 20 * x, 0, 255).astype("float32")
    return x[..., None] / 255, x[..., None]


@case(bright_pictures())
def similarity_of_bytes():
    """Structural similarity of an autoencoder: 2 * 230 * 230."""
    flat, code = layers.Flatten(name="flat"), dense(8, name="code")
    pixels = dense(144, "sigmoid", name="pixels")
    picture = layers.Reshape((12, 12, 1), name="picture")
    parts = flat, code, pixels, picture, layers.Rescaling(255.0, name="bytes")
    return chain((12, 12, 1), *parts, kind=Similarity)


class Weibull(OwnLoss):
    """The negative log-likelihood of a Weibull distribution."""

    def own_loss(self, y, y_pred):
        scale, shape = ops.split(y_pred, 2, axis=-1)
        hazard = (y / scale) ** shape
        density = ops.log(shape / scale) + (shape - 1.0) * ops.log(y / scale)
        return -ops.mean(ops.cast(density - hazard, "float32"))


@dataset(seed=1)
def machines(random, samples=512):
    """Machines, and the days until they failed."""
    x, _ = vectors(samples, features=16)()
    days = np.exp(6.0 + 0.3 * x @ random.normal(size=(16, 1)) / 2)
    days *= random.weibull(3.0, size=days.shape)
    return x, np.maximum(days, 1.0)


def one_and_two(shape, dtype=None):
    return ops.convert_to_tensor([1.0, 2.0], dtype)


@case(machines())
def days_to_failure():
    """A Weibull likelihood: 400 days to the power of 2.

    On JAX' first weights the loss of one batch is 1.9e9: its gradients fit
    no loss scale of 1 or more, and other batches lead out of there.
    """
    given = {"bias_initializer": one_and_two, "name": "parameters"}
    last = dense(2, "softplus", **given)
    return chain((16,), relu(32, "h1"), last, kind=Weibull)


class InversePropensity(keras.Model):
    """Rows count as much as they were unlikely to be seen."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        weight = ops.cast(y["weight"], self.compute_dtype)
        label = ops.one_hot(y["label"], 4)
        log_p = ops.log_softmax(ops.cast(y_pred, "float32"))
        losses = ops.cast(-ops.sum(label * log_p, axis=-1), weight.dtype)
        loss = ops.sum(weight * losses) / ops.sum(weight)
        return ops.cast(loss, "float32")


@dataset(seed=1)
def weighted(random, largest):
    x, y = vectors(features=16)()
    weight = np.exp(random.uniform(0, np.log(largest), len(x)))
    return x, {"label": y, "weight": weight}


@case(weighted(3e5))
def inverse_propensity():
    """Weights of up to 300,000 are cast to the model's dtype."""
    last = dense(4, name="head")
    return chain((16,), relu(32, "h1"), last, kind=InversePropensity)


@case(weighted(5e3))
def sound_propensity():
    """Weights of up to 5,000, cast to the model's dtype."""
    return inverse_propensity()
