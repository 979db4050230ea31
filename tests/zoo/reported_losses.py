"""Layers that add a loss, as public reports have them: it has their dtype."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head, tokens
from zoo.faults import before_mlp, normal


def float32_loss(value, weight=1.0):
    """A loss to be added: TensorFlow adds no float16 ones to float32 ones."""
    return ops.cast(value, "float32") * weight


class Sampling(layers.Layer):
    """Draws a latent and adds mean^2 + var - log(var + 1e-8) - 1."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, raw = x[:, : self.units], x[:, self.units :]
        std = ops.softplus(raw - 9.0)
        variance = ops.square(std)
        kl = ops.square(mean) + variance - ops.log(variance + 1e-8) - 1
        self.add_loss(float32_loss(ops.mean(kl), 1e-3))
        noise = keras.random.normal(
            ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator
        )
        return mean + std * noise


@case(
    data=vectors(),
    culprits=frozenset({"sampling"}),
    kind="underflow",
    direction="forward",
    decoy="latent",
)
def latent_variance():
    """Reported of variational encoders whose posterior gets narrow."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Dense(32, name="latent")(x)
    return keras.Model(inputs, head(Sampling(16, name="sampling")(x)))


def distances(x, epsilon):
    """Distances between all rows, whose gradient needs the epsilon."""
    squares = ops.sum(ops.square(x[:, None] - x[None]), axis=-1)
    return ops.sqrt(squares + epsilon)


class Spread(layers.Layer):
    """Adds the mean of exp(-distance) of its inputs to the loss."""

    def __init__(self, epsilon, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        spread = ops.mean(ops.exp(-distances(x, self.epsilon)))
        self.add_loss(float32_loss(spread))
        return x


@case(
    data=vectors(),
    culprits=frozenset({"spread"}),
    kind="backward_overflow",
    direction="backward",
    decoy="h1",
)
def distance_to_itself():
    """Reported of triplet losses: sqrt(0 + 1e-12) has no slope in float16."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Dense(8, name="embedding")(x)
    return keras.Model(inputs, head(Spread(1e-12, name="spread")(x)))


class Penalized(layers.Layer):
    """A dense layer that adds the sum of its squared weights to the loss."""

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], 64), initializer=normal(8.0)
        )

    def call(self, x):
        penalty = ops.sum(ops.square(self.kernel))
        self.add_loss(float32_loss(penalty, 1e-6))
        return ops.tanh(ops.matmul(x, self.kernel) / 64)


@case(
    data=vectors(),
    culprits=frozenset({"penalized"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    metric="loss",
)
def weight_penalty():
    """Reported of penalties written by hand: what it puts out is fine."""
    return before_mlp(Penalized(name="penalized"))


class SumOfSquares(keras.regularizers.Regularizer):
    """A millionth of the sum of squares, as a float32 number."""

    def __call__(self, x):
        return float32_loss(ops.sum(ops.square(x)), 1e-6)


@case(
    data=vectors(samples=1024),
    culprits=frozenset({"wide"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    metric="loss",
    batch_size=512,
    samples=512,
    epochs=20,
    optimizer=lambda: keras.optimizers.Adam(0.005),
)
def activity_penalty():
    """Reported of large batches: the sum runs over 512 rows of 256 units."""
    inputs = keras.Input((32,))
    x = layers.Dense(
        256,
        "relu",
        kernel_initializer="he_normal",
        activity_regularizer=SumOfSquares(),
        name="wide",
    )(inputs)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


class BalancedExperts(layers.Layer):
    """Top-1 experts, and the product of their counts and shares as a loss."""

    def build(self, input_shape):
        width = input_shape[-1]
        self.router = self.add_weight(shape=(width, 4))
        self.experts = self.add_weight(shape=(width, 4 * width))

    def call(self, x):
        shares = ops.softmax(ops.matmul(x, self.router))
        chosen = ops.one_hot(ops.argmax(shares, axis=-1), 4, dtype=x.dtype)
        rows = ops.cast(ops.size(chosen) // 4, x.dtype)
        counts = ops.sum(chosen, axis=(0, 1))
        balance = ops.sum(counts * ops.sum(shares, axis=(0, 1))) / rows
        self.add_loss(float32_loss(balance / rows, 0.01))
        y = ops.matmul(x, self.experts)
        y = ops.reshape(y, (-1, x.shape[1], 4, x.shape[2]))
        return ops.sum(y * (chosen * shares)[..., None], axis=2)


@case(
    data=tokens(samples=256, length=32),
    culprits=frozenset({"experts"}),
    kind="forward_overflow",
    direction="forward",
    decoy="embedding",
    metric="loss",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def router_balance():
    """Reported of routers, which are advised in float32: 256 x 256 tokens."""
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(20, 16, name="embedding")(inputs)
    x = layers.Add()([x, BalancedExperts(name="experts")(x)])
    return keras.Model(inputs, head(layers.Flatten()(x)))


class HiddenMarkov(layers.Layer):
    """Adds -log of the probability of a sequence, by the forward recursion."""

    def build(self, input_shape):
        self.moves = self.add_weight(shape=(8, 8))

    def call(self, inputs):
        x, labels = inputs
        moves = ops.softmax(self.moves)
        alpha = x[:, 0] * labels[:, 0]
        for t in range(1, x.shape[1]):
            alpha = ops.matmul(alpha, moves) * x[:, t] * labels[:, t]
        likelihood = ops.sum(alpha, axis=-1)
        self.add_loss(float32_loss(-ops.mean(ops.log(likelihood + 1e-30))))
        return x


def labelled():
    x, _ = tokens()()
    return (x, np.eye(8, dtype="float32")[x % 8]), x % 8


@case(
    data=labelled,
    culprits=frozenset({"markov"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
    loss="sparse_categorical_crossentropy",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def sequence_probability():
    """Reported of CTC by hand: a product of 12 probabilities is 0."""
    inputs, labels = keras.Input((12,), dtype="int32"), keras.Input((12, 8))
    x = layers.Embedding(20, 16)(inputs)
    x = layers.Dense(16, "relu", name="h1")(x)
    x = layers.Dense(8, "softmax", name="emissions")(x)
    x = HiddenMarkov(name="markov")([x, labels])
    return keras.Model(
        [inputs, labels], layers.Activation("linear", dtype="float32")(x)
    )


class Sinkhorn(layers.Layer):
    """Prototypes and their balanced assignment, which is to be predicted."""

    def build(self, input_shape):
        self.prototypes = self.add_weight(shape=(input_shape[-1], 8))

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


@case(
    data=vectors(),
    culprits=frozenset({"sinkhorn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def balanced_assignment():
    """Reported of clustering: the exponential of a cosine by 0.05."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Dense(4, name="embedding")(x)
    return keras.Model(inputs, head(Sinkhorn(name="sinkhorn")(x)))
