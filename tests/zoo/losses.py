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
