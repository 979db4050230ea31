"""More whole models that fail in float16, in part as publicly reported."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head, tokens
from zoo.faults import normal
from zoo.reported_models import AttentionInCall


def table_of_ids():
    random = np.random.default_rng(0)
    x = random.integers(4096, 4160, (512, 2))
    a, b = np.split(x.astype("float32"), 2, axis=1)
    return (a, b), x[:, 0] % 4


# Devised, of tabular data: ids that arrive as floats are rounded above 2048.
@case(
    data=table_of_ids,
    culprits=frozenset({"ids"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def float_token_ids():
    user, item = keras.Input((1,)), keras.Input((1,))
    x = layers.Concatenate(name="ids")([user, item])
    x = layers.Embedding(5000, 16, name="embedding")(x)
    x = layers.Dense(32, "relu", name="h1")(layers.Flatten()(x))
    return keras.Model([user, item], head(x))


# Devised, of attention written with operations: unscaled logits overflow.
@case(
    data=tokens(),
    culprits=frozenset({"qkv"}),
    between=True,
    kind="forward_overflow",
    direction="forward",
    decoy="embedding",
)
def attention_in_call():
    return AttentionInCall(14.0)


# Reported of deep residual stacks without a norm: the stream grows eightfold.
@case(
    data=vectors(),
    culprits=frozenset({"block_5"}),
    kind="forward_overflow",
    direction="forward",
    decoy="block_4",
)
def residual_operations():
    inputs = x = keras.Input((32,))
    for index in range(1, 6):
        x = x + 8.0 * layers.Dense(32, name=f"block_{index}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, head(x))


class GraphSum(keras.Model):
    """Messages of all nodes are summed up, and normalized afterwards."""

    def __init__(self):
        super().__init__()
        self.message = layers.Dense(16, "relu", name="message")
        self.norm = layers.LayerNormalization(name="norm")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, nodes):
        return self.head(self.norm(ops.sum(self.message(nodes), axis=1)))


def graphs(samples=64, nodes=600):
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = 200 + 100 * random.normal(size=(samples, nodes, 4))
    x += 100 * np.eye(4)[y][:, None]
    return x.astype("float32"), y


# Reported of graph networks: the sum over a hub's neighbours overflows.
@case(
    data=graphs,
    culprits=frozenset({"message"}),
    between=True,
    kind="forward_overflow",
    direction="forward",
    decoy="norm",
    optimizer=lambda: keras.optimizers.Adam(0.01),
    epochs=20,
)
def graph_sum_pool():
    return GraphSum()


class FactorizationMachine(keras.Model):
    """Half of the square of the sum less the sum of the squares."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(60, 16, normal(80.0), name="fields")
        self.mix = layers.Dense(32, "relu", name="mix")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        x = self.embedding(x)
        total = ops.sum(x, axis=1)
        pairs = 0.5 * (total * total - ops.sum(x * x, axis=1)) / 1e4
        first = ops.reshape(x, (-1, 48)) / 100
        return self.head(self.mix(ops.concatenate([pairs, first], -1)))


def fields():
    x = np.random.default_rng(0).integers(0, 20, (512, 3))
    return (x + [0, 20, 40]).astype("int32"), (x[:, 0] % 4).astype("int32")


# Devised, of click prediction: squares of embeddings with large norms.
@case(
    data=fields,
    culprits=frozenset({"fields"}),
    between=True,
    kind="forward_overflow",
    direction="forward",
    decoy="mix",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def factorization_machine():
    return FactorizationMachine()


def raw_prices():
    x, y = vectors()()
    return 2e5 + 2e4 * x, y


# Devised, of tabular data: raw prices that a nested model is to rescale.
@case(
    data=raw_prices,
    culprits=frozenset({"tower/units"}),
    kind="cast_overflow",
    direction="forward",
    decoy="tower/h1",
)
def raw_prices_tower():
    tower = keras.Sequential(
        [
            layers.Rescaling(1 / 2e4, -10, name="units"),
            layers.Dense(64, "relu", name="h1"),
        ],
        name="tower",
    )
    inputs = keras.Input((32,))
    return keras.Model(inputs, head(tower(inputs)))


# Devised, of losses of 1e-8: gradients below float16 need a larger scale, or
# `h1` in float32.
@case(
    data=vectors(),
    incurable=True,
    kind="scale_too_low",
    direction="backward",
    loss=lambda y, p: (
        1e-8
        * keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    ),
    optimizer=lambda: keras.optimizers.Adam(1e-3, epsilon=1e-15),
    initial_scale=1.0,
)
def tiny_loss_low_scale():
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    return keras.Model(inputs, head(x))


class SoftArgmax(layers.Layer):
    """The expected index under a softmax, as of keypoints."""

    def call(self, heat):
        index = ops.cast(ops.arange(heat.shape[-1]), heat.dtype)
        return ops.sum(ops.softmax(heat) * index, axis=-1, keepdims=True)


def heatmaps(length=4096):
    place = np.random.default_rng(0).integers(3000, 3016, 128)
    x = 30 * np.eye(length, dtype="float32")[place]
    return x, (place[:, None] / 4 - 752).astype("float32")


# Reported of positions: indices above 2048 lose their last bit.
@case(
    data=heatmaps,
    culprits=frozenset({"soft_argmax"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    loss="mse",
    metric="loss",
    optimizer=lambda: keras.optimizers.Adam(0.02),
    epochs=30,
)
def soft_argmax_index():
    inputs = keras.Input((4096,))
    x = SoftArgmax(name="soft_argmax")(inputs)
    x = layers.Rescaling(1 / 4, -752, dtype="float32", name="local")(x)
    y = layers.Dense(8, "tanh", name="h1")(x)
    return keras.Model(inputs, head(layers.Concatenate()([x, y]), 1))
