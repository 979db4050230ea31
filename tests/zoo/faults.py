"""The faults that the thresholds of the diagnosis were set on."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head, tokens


def normal(std):
    return keras.initializers.RandomNormal(stddev=std, seed=1)


def before_mlp(layer, units=64):
    """Returns a classifier of vectors that the layer looks at first."""
    inputs = keras.Input((32,))
    x = layers.Dense(units, "relu", name="h1")(layer(inputs))
    return keras.Model(inputs, head(x))


@case(
    data=tokens(),
    culprits=frozenset({"ffn_wo", "res_add"}),
    kind="forward_overflow",
    direction="forward",
    decoy="ffn_wi",
)
def t5_ffn():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 64)(inputs)
    y = layers.LayerNormalization(name="ln_in")(x)
    y = layers.Dense(
        512, "relu", kernel_initializer=normal(6.0), name="ffn_wi"
    )(y)
    y = layers.Dense(
        64, kernel_initializer=normal(200.0), trainable=False, name="ffn_wo"
    )(y)
    x = layers.Add(name="res_add")([x, y])
    x = layers.LayerNormalization(name="ln_out")(x)
    return keras.Model(inputs, head(layers.Flatten()(x)))


def prices():
    x, _ = vectors()()
    random = np.random.default_rng(1)
    y = 1.5e5 + 2e4 * (x @ random.normal(size=(32, 1)))
    return x, y.astype("float32")


@case(
    data=prices,
    culprits=frozenset({"head"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    loss="mae",
    metric="loss",
    optimizer=lambda: keras.optimizers.Adam(0.1),
    epochs=60,
    warm_up=40,
)
def house_price_head():
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Dense(64, "relu", name="h2")(x)
    return keras.Model(inputs, layers.Dense(1, name="head")(x))


class RawAttention(layers.Layer):
    """Attention that does not divide by sqrt(dim)."""

    def call(self, query, key, value):
        scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
        return ops.matmul(ops.softmax(scores), value)


@case(
    data=tokens(),
    culprits=frozenset({"attn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="q",
)
def attn_logits():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 64, embeddings_initializer=normal(1.0))(inputs)
    q = layers.Dense(64, kernel_initializer=normal(16.0), name="q")(x)
    k = layers.Dense(64, kernel_initializer=normal(16.0), name="k")(x)
    x = layers.Add()([x, RawAttention(name="attn")(q, k, x)])
    return keras.Model(inputs, head(layers.Flatten()(x)))


class MaskedAttention(layers.Layer):
    """Attention that adds -1e9 where the mask is zero."""

    def call(self, x):
        scores = ops.matmul(x, ops.swapaxes(x, -1, -2)) * 0.125
        mask = ops.cast(ops.tri(x.shape[1]), x.dtype)
        scores = scores + (1.0 - mask) * ops.cast(-1e9, x.dtype)
        return ops.matmul(ops.softmax(scores), x)


@case(
    data=tokens(),
    culprits=frozenset({"attn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="proj",
)
def attn_mask():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 64)(inputs)
    x = layers.Dense(64, name="proj")(x)
    x = MaskedAttention(name="attn")(x)
    return keras.Model(inputs, head(layers.Flatten()(x)))


@case(
    data=tokens(),
    culprits=frozenset({"attention"}),
    kind="forward_overflow",
    direction="forward",
    decoy="proj",
)
def attention_builtin():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 64, embeddings_initializer=normal(1.0))(inputs)
    y = layers.Dense(64, kernel_initializer=normal(8.0), name="proj")(x)
    y = layers.Attention(name="attention")([y, y])
    y = layers.LayerNormalization(name="ln")(y)
    return keras.Model(inputs, head(layers.Flatten()(layers.Add()([x, y]))))


def sequences(samples=128, length=100, largest=2000.0):
    def data():
        random = np.random.default_rng(0)
        x = random.uniform(0, largest, (samples, length, 1)).astype("float32")
        return x, (x.mean(axis=1) / largest).astype("float32")

    return data


@case(
    data=sequences(),
    culprits=frozenset({"rnn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="out",
    loss="mse",
    metric="loss",
    epochs=8,
)
def rnn_overflow():
    inputs = keras.Input((100, 1))
    x = layers.SimpleRNN(
        8,
        activation="relu",
        kernel_initializer=keras.initializers.Constant(1.0),
        recurrent_initializer="identity",
        name="rnn",
    )(inputs)
    x = layers.Rescaling(1e-5, dtype="float32", name="scale")(x)
    return keras.Model(inputs, layers.Dense(1, name="out", dtype="float32")(x))


class NaiveRMSNorm(layers.Layer):
    """x / sqrt(mean(x*x) + eps), with the sum taken first."""

    def call(self, x):
        mean = ops.sum(x * x, -1, keepdims=True) / x.shape[-1]
        return x / ops.sqrt(mean + 1e-6)


@case(
    data=vectors(scale=400.0),
    culprits=frozenset({"naive_rms"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def rms_overflow():
    return before_mlp(NaiveRMSNorm(name="naive_rms"))


def pairs(scale=300.0):
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 512).astype("int32")
    a = np.sign(random.normal(size=(512, 16))) * scale
    sign = np.where(y[:, None] == 1, 1.0, np.sign(random.normal(size=(512, 1))))
    noise = np.sign(random.normal(size=(512, 16)))
    b = np.where(y[:, None] == 1, a * sign, a * noise)
    return (a.astype("float32"), b.astype("float32")), y


@case(
    data=pairs,
    culprits=frozenset({"cos"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def dot_builtin():
    a, b = keras.Input((16,)), keras.Input((16,))
    x = layers.Dot(axes=1, normalize=True, name="cos")([a, b])
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model([a, b], head(x, 2))


class NaiveBatchNorm(layers.Layer):
    """E[x^2] - E[x]^2 over the batch."""

    def call(self, x):
        count = ops.cast(ops.shape(x)[0], x.dtype)
        mean = ops.sum(x, 0) / count
        variance = ops.sum(x * x, 0) / count - mean * mean
        return (x - mean) / ops.sqrt(variance + 1e-3)


@case(
    data=vectors(mean=200.0),
    culprits=frozenset({"naive_bn"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def bn_variance_200():
    return before_mlp(NaiveBatchNorm(name="naive_bn"))


@case(
    data=vectors(mean=30.0),
    culprits=frozenset({"naive_bn"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
)
def bn_variance_30():
    return bn_variance_200()


class SumPool(layers.Layer):
    """Sum over all positions, divided afterwards."""

    def call(self, x):
        return ops.sum(x, axis=1) / x.shape[1]


def long_signals(samples=64, length=70000):
    def data():
        random = np.random.default_rng(0)
        y = random.integers(0, 2, samples).astype("int32")
        x = random.normal(size=(samples, length, 1)) * 0.1 + 1.5
        x = x + 0.5 * y[:, None, None]
        return x.astype("float32"), y

    return data


@case(
    data=long_signals(),
    culprits=frozenset({"sum_pool"}),
    tolerated=frozenset({"conv"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    epochs=20,
    batch_size=16,
    samples=16,
    optimizer=lambda: keras.optimizers.Adam(0.05),
)
def big_sum():
    inputs = keras.Input((70000, 1))
    x = layers.Conv1D(
        2, 1, kernel_initializer=keras.initializers.Constant(1.0), name="conv"
    )(inputs)
    x = SumPool(name="sum_pool")(x)
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model(inputs, head(x, 2))


class Gate(layers.Layer):
    """Adds the entropy of a sigmoid gate as a feature."""

    def call(self, x):
        p = ops.sigmoid(x)
        entropy = -p * ops.log(p + 1e-8)
        return ops.concatenate([x, entropy], axis=-1)


def with_large():
    x, y = vectors()()
    x[::16, 0] = -30.0
    return x, y


@case(
    data=with_large,
    culprits=frozenset({"gate"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
)
def entropy_log():
    return before_mlp(Gate(name="gate"))


@case(
    data=vectors(scale=1e-4),
    culprits=frozenset({"unit_norm"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
)
def unit_norm_builtin():
    return before_mlp(layers.UnitNormalization(name="unit_norm"))


class NaiveLayerNorm(layers.Layer):
    """Layer normalization with BERT's epsilon."""

    def call(self, x):
        mean = ops.mean(x, -1, keepdims=True)
        variance = ops.mean(ops.square(x - mean), -1, keepdims=True)
        return (x - mean) * ops.rsqrt(variance + 1e-12)


def with_zero_rows():
    x, y = vectors()()
    x[::16] = 0.0
    return x, y


@case(
    data=with_zero_rows,
    culprits=frozenset({"naive_ln"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
)
def ln_eps():
    return before_mlp(NaiveLayerNorm(name="naive_ln"))


def naive_binary_crossentropy(y_true, y_pred):
    y_true = ops.cast(y_true, y_pred.dtype)
    return -ops.mean(
        y_true * ops.log(y_pred) + (1 - y_true) * ops.log(1 - y_pred)
    )


def separable():
    x, y = vectors(classes=2)()
    margin = x[:, :1] * 0 + (2.0 * y[:, None] - 1.0)
    x[:, :1] = 4.0 * margin
    return x, y[:, None].astype("float32")


@case(
    data=separable,
    culprits=frozenset({"prob"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
    loss=naive_binary_crossentropy,
    metric="loss",
    epochs=20,
    warm_up=20,
    optimizer=lambda: keras.optimizers.Adam(0.005),
)
def bce_prob():
    inputs = keras.Input((32,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(1, name="logit")(x)
    return keras.Model(inputs, layers.Activation("sigmoid", name="prob")(x))


class Ratio(layers.Layer):
    """a / (b + 1e-3), whose gradient is -a / b / b."""

    def call(self, inputs):
        a, b = ops.split(inputs, 2, axis=-1)
        return a / (ops.relu(b) + 1e-3)


@case(
    data=vectors(),
    culprits=frozenset({"ratio"}),
    kind="backward_overflow",
    direction="backward",
    decoy="h1",
    # On torch, whose derivative of max(b, 0) selects zeros rather than
    # multiplying by them, it takes a very small b.
    warm_up=3,
    samples=256,
)
def ratio_collapse():
    inputs = keras.Input((32,))
    x = layers.Dense(64, name="h1")(inputs)
    x = Ratio(name="ratio")(x)
    x = layers.LayerNormalization(name="ln")(x)
    return keras.Model(inputs, head(x))


@case(
    data=vectors(),
    culprits=frozenset({"b1", "b_head"}),
    kind="underflow",
    direction="backward",
    decoy="b_none",
    scaled=False,
    loss=lambda y, p: (
        1e-7
        * keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    ),
    optimizer=lambda: keras.optimizers.Adam(1e-3, epsilon=1e-14),
)
def grad_underflow():
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="b1")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="b_head")(x))


def cross_entropy_1e_7(y_true, y_pred):
    return 1e-7 * keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )


def class_and_price():
    x, y = vectors()()
    price = 1e4 * (1 + 0.1 * x[:, :1])
    return x, {"classes": y, "price": price.astype("float32")}


@case(
    data=class_and_price,
    culprits=frozenset({"price"}),
    kind="backward_overflow",
    direction="backward",
    decoy="a1",
    loss={"classes": cross_entropy_1e_7, "price": "mse"},
    metric="classes_accuracy",
    optimizer=lambda: keras.optimizers.Adam(1e-3, epsilon=1e-14),
)
def range_conflict():
    inputs = keras.Input((32,))
    a = layers.Dense(64, "relu", name="a1")(inputs)
    a = layers.Dense(4, name="classes")(a)
    b = layers.Dense(1, name="price")(inputs)
    return keras.Model(inputs, {"classes": a, "price": b})
