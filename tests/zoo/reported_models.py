"""Whole models that fail in float16, in part as publicly reported.

Their operations are in part between the layers, in the model's `call`. On JAX
a subclassed model does not cast what it is given, so that some are well there.
"""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head
from zoo.faults import before_mlp, normal


class DeepCross(keras.Model):
    """x0 * (x W) + x beside a dense tower, on features as they come.

    The product is in float32 once the model does not cast `x0`.
    """

    def __init__(self):
        super().__init__()
        self.cross_1 = layers.Dense(32, name="cross_1")
        self.cross_2 = layers.Dense(32, name="cross_2")
        self.norm = layers.LayerNormalization(name="norm")
        self.deep = layers.Dense(64, "relu", name="deep")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x0):
        x = ops.add(ops.multiply(x0, self.cross_1(x0)), x0)
        x = ops.add(ops.multiply(x0, self.cross_2(x)), x)
        x = self.norm(x)
        return self.head(ops.concatenate([x, self.deep(x0) / 30], -1))


# Devised, of recommenders: products of raw features overflow at depth two.
@case(
    data=vectors(scale=30.0),
    culprits=frozenset({"<model>"}),
    kind="forward_overflow",
    direction="forward",
    decoy="cross_1",
    absent_on=frozenset({"jax"}),
)
def deep_cross():
    return DeepCross()


class Nerf(keras.Model):
    """Sines of a coordinate times powers of two, then a linear head."""

    def __init__(self):
        super().__init__()
        self.h1 = layers.Dense(32, "relu", name="h1")
        self.head = layers.Dense(2, dtype="float32", name="head")

    def call(self, x):
        powers = ops.cast(np.pi * 2.0 ** np.arange(13), x.dtype)
        angles = x * powers
        encoded = ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)
        return self.head(ops.concatenate([encoded, self.h1(encoded)], -1))


def coordinates():
    x = np.random.default_rng(0).uniform(0.5, 1, (512, 1)).astype("float32")
    return x, (np.sin(2**12 * np.pi * x[:, 0]) > 0).astype("int32")


# Reported of sinusoidal encodings: high frequencies become noise.
@case(
    data=coordinates,
    culprits=frozenset({"<model>"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
    absent_on=frozenset({"jax"}),
)
def nerf_encoding():
    return Nerf()


def days():
    day = np.random.default_rng(0).integers(0, 32, (512, 1))
    return (19690.0 + day).astype("float32"), day[:, 0] // 8


# Devised, of time series: days since 1970 are 16 apart in float16.
@case(
    data=days,
    culprits=frozenset({"normalize"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
    epochs=12,
)
def days_since_epoch():
    inputs = keras.Input((1,))
    x = layers.Normalization(mean=19706.0, variance=85.0, name="normalize")(
        inputs
    )
    x = layers.Dense(64, "tanh", name="h1")(x)
    return keras.Model(inputs, head(x))


class Square(layers.Layer):
    def call(self, x):
        return ops.square(ops.relu(x))


# Devised, of squared ReLUs: what saturates behind them hides the infinity.
@case(
    data=vectors(),
    culprits=frozenset({"square", "saturating"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def saturated_square():
    inputs = keras.Input((32,))
    x = layers.Dense(64, kernel_initializer=normal(25.0), name="h1")(inputs)
    x = Square(name="square")(x)
    small = keras.initializers.RandomUniform(0.0, 3e-6, seed=1)
    x = layers.Dense(
        32, "tanh", False, small, trainable=False, name="saturating"
    )(x)
    return keras.Model(inputs, head(layers.BatchNormalization(name="bn")(x)))


class AttentionInCall(keras.Model):
    """Attention of one wide head, without 1/sqrt(dim), between layers."""

    def __init__(self, std):
        super().__init__()
        self.embedding = layers.Embedding(20, 64, normal(1.0), name="embedding")
        self.qkv = layers.Dense(192, kernel_initializer=normal(std), name="qkv")
        self.norm = layers.LayerNormalization(name="norm")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        x = self.embedding(x)
        query, key, value = ops.split(self.qkv(x), 3, axis=-1)
        scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
        x = self.norm(ops.matmul(ops.softmax(scores), value))
        return self.head(ops.reshape(x, (-1, 12 * 64)))


class Prototypes(layers.Layer):
    """-|x - c|^2 as x^2 + c^2 - 2 x c, to a prototype of each class."""

    def build(self, input_shape):
        self.centres = self.add_weight(
            shape=(4, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(40.0, 0.5, seed=1),
        )

    def call(self, x):
        square = ops.sum(x * x, axis=-1, keepdims=True)
        squares = ops.sum(self.centres * self.centres, axis=-1)
        product = ops.matmul(x, ops.transpose(self.centres))
        return (2 * product - square - squares) / 4


def clusters():
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 512).astype("int32")
    x = 40 + random.normal(size=(4, 16))[y]
    return (x + 0.3 * random.normal(size=x.shape)).astype("float32"), y


# Devised, of metric learning: distances by the binomial formula cancel.
@case(
    data=clusters,
    culprits=frozenset({"prototypes"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def pairwise_cancellation():
    inputs = keras.Input((16,))
    x = layers.Dense(16, kernel_initializer="identity", name="h1")(inputs)
    return keras.Model(inputs, Prototypes(name="prototypes")(x))


class Euler(keras.Model):
    """64 small steps along one learned field, and how far they led."""

    def __init__(self):
        super().__init__()
        self.field = layers.Dense(
            32, "tanh", kernel_initializer=normal(0.05), name="field"
        )
        self.h1 = layers.Dense(32, "relu", name="h1")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, start):
        x = start
        for _ in range(64):
            x = ops.add(x, self.field(x) * 2.0**-12)
        moved = ops.subtract(x, start) * 64.0
        return self.head(ops.concatenate([moved, self.h1(moved)], -1))


# Devised, of neural differential equations: steps below half an ulp are lost.
@case(
    data=vectors(mean=4.0),
    culprits=frozenset({"<model>"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
    absent_on=frozenset({"jax"}),
)
def euler_steps():
    return Euler()


class Scan(layers.Layer):
    """h_t = a h_(t-1) + x_t, by a running product and a running sum."""

    def build(self, input_shape):
        self.decay = self.add_weight(
            shape=input_shape[-1:],
            initializer=keras.initializers.Constant(2.2),
        )

    def call(self, x):
        decay = ops.broadcast_to(ops.sigmoid(self.decay), ops.shape(x))
        product = ops.cumprod(decay, axis=1)
        return (ops.cumsum(x / product, axis=1) * product)[:, -1]


def recent(samples=128, length=200):
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, length, 4)).astype("float32")
    return x, np.argmax(x[:, -4:].sum(axis=1), axis=-1).astype("int32")


# Devised, of state space models: what is divided by a running product of decays
# overflows, and the product vanishes.
@case(
    data=recent,
    culprits=frozenset({"scan"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def selective_scan():
    inputs = keras.Input((200, 4))
    x = layers.Dense(8, name="h1")(inputs)
    return keras.Model(inputs, head(Scan(name="scan")(x)))


def squares(outputs):
    """TensorFlow adds no float16 losses to float32 ones, hence the cast."""
    return 1e-9 * ops.cast(ops.sum(ops.square(outputs)), "float32")


# Devised, of sparse autoencoders: the penalty sums squares over the batch, so
# that the loss is not finite, while its gradients are.
@case(
    data=vectors(scale=20.0),
    culprits=frozenset({"h1"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h2",
    metric="loss",
)
def squared_activity_penalty():
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", activity_regularizer=squares, name="h1")(
        inputs
    )
    x = layers.Dense(32, "relu", name="h2")(x)
    return keras.Model(inputs, head(x))


class Decorrelated(layers.Layer):
    """A projection that adds the norm of its weights to the loss."""

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], 512), initializer=normal(3.0)
        )

    def call(self, x):
        penalty = ops.sum(self.kernel * self.kernel)
        self.add_loss(ops.cast(ops.sqrt(penalty), "float32") * 1e-3)
        return ops.matmul(x, self.kernel) / 100


# Devised, of weight penalties in `call`, where weights are cast to float16.
@case(
    data=vectors(),
    culprits=frozenset({"penalized"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    metric="loss",
)
def weight_penalty_in_call():
    return before_mlp(Decorrelated(name="penalized"))


def half_dense(units, *arguments, **keywords):
    """A layer whose weights are float16 too, where float16 is trained in."""
    policy = keras.config.dtype_policy().name
    dtype = "float16" if policy == "mixed_float16" else policy
    return layers.Dense(units, *arguments, dtype=dtype, **keywords)


# Reported of Adam on float16 weights: squares of gradients and 1e-8 vanish.
@case(
    data=vectors(),
    kind="policy",
    direction="update",
    optimizer=lambda: keras.optimizers.Adam(epsilon=1e-8),
    # Our optimizer refuses that epsilon.
    scaled=False,
    incurable=True,
)
def adam_on_half_weights():
    inputs = keras.Input((32,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    return keras.Model(inputs, head(half_dense(64, "relu", name="half")(x)))
