"""Models that resemble the failures beside, and train well in float16."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head, tokens
from zoo.faults import before_mlp, normal
from zoo.reported_models import AttentionInCall, DeepCross
from zoo.reported_steps import Distillation


# Like deep_cross: the same products of features that were normalized.
@case(data=vectors())
def healthy_deep_cross():
    return DeepCross()


class MaskedLogits(layers.Layer):
    """Attention with large logits, and -65504 added where it may not look."""

    def call(self, x):
        scores = 4 * ops.matmul(x, ops.swapaxes(x, -1, -2))
        hidden = 1 - ops.cast(ops.tri(x.shape[1]), x.dtype)
        return ops.matmul(ops.softmax(scores - 65504 * hidden), x)


# Like attn_mask: -65504 becomes -inf with a logit, which a softmax stands.
@case(data=tokens(), optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_lowest_mask():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 32, normal(1.0))(inputs)
    x = layers.Add()([x, MaskedLogits()(x)])
    return keras.Model(inputs, head(layers.Flatten()(x)))


# Like attention_in_call: logits of 2000, which a softmax stands.
@case(data=tokens())
def healthy_large_logits():
    return AttentionInCall(2.0)


def maps(samples=32):
    random = np.random.default_rng(0)
    y = random.integers(0, 2, samples).astype("int32")
    x = 200 + 20 * random.normal(size=(samples, 64, 64, 2))
    x[..., 0] += 20 * y[:, None, None]
    return x.astype("float32"), y


# Like big_sum: Keras' own pooling of 4096 values of 200 adds up in float32.
@case(data=maps, optimizer=lambda: keras.optimizers.Adam(0.05), epochs=20)
def healthy_global_pool():
    inputs = keras.Input((64, 64, 2))
    x = layers.GlobalAveragePooling2D()(inputs)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, head(x, 2))


def large_ids():
    x = np.random.default_rng(0).integers(99000, 99020, (512, 3))
    return x.astype("int32"), (x[:, 0] % 4).astype("int32")


# Like float_token_ids: ids far beyond 65504 are integers, and stay exact.
@case(data=large_ids, optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_large_ids():
    inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(99100, 4)(inputs)
    return keras.Model(inputs, head(layers.Flatten()(x)))


class SaturatedGate(layers.Layer):
    """x sigmoid(g), whose gates are zero in float16 and 1e-9 in float32."""

    def build(self, input_shape):
        self.gate = layers.Dense(
            32, bias_initializer=keras.initializers.RandomUniform(-40, 40, 1)
        )
        self.gate.build(input_shape)

    def call(self, x):
        return x * ops.sigmoid(self.gate(x))


# Like entropy_log: half of the gates vanish, and nothing divides by them.
@case(data=vectors(features=32))
def healthy_saturated_gate():
    return before_mlp(SaturatedGate())


# Like residual_operations: a stream of 1e4 between norms.
@case(data=vectors(scale=50.0))
def healthy_large_stream():
    inputs = x = keras.Input((32,))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = x + 200.0 * layers.Dense(32, "relu")(y)
    return keras.Model(inputs, head(layers.LayerNormalization()(x)))


def years():
    random = np.random.default_rng(0)
    x = random.integers(1990, 2030, (512, 1))
    return x.astype("float32"), ((x[:, 0] - 1990) // 10).astype("int32")


# Like days_since_epoch: years below 2048 are exact.
@case(
    data=years,
    optimizer=lambda: keras.optimizers.Adam(0.01),
    epochs=20,
)
def healthy_years():
    inputs = keras.Input((1,))
    x = layers.Normalization(mean=2010.0, variance=130.0)(inputs)
    return keras.Model(inputs, head(layers.Dense(64, "tanh")(x)))


# Like weight_penalty_in_call: Keras adds up squares of weights in float32.
@case(data=vectors(scale=0.1))
def healthy_weight_decay():
    inputs = keras.Input((32,))
    x = layers.Dense(
        512, "relu", kernel_initializer=normal(3.0), kernel_regularizer="l2"
    )(inputs)
    return keras.Model(inputs, head(layers.LayerNormalization()(x)))


class SafeDistillation(Distillation):
    """Cross entropy to a frozen teacher by a log softmax."""

    def log_probabilities(self, logits):
        return ops.log_softmax(logits)


# Like distillation: probabilities of zero, whose logarithms are finite.
@case(
    data=vectors(samples=1024, scale=12.0),
    loss=None,
    initial_scale=2.0**10,
    batch_size=128,
    samples=128,
)
def healthy_distillation():
    return SafeDistillation()
