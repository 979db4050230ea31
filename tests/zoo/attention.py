"""Attention, its masks, and other weights that are made with a softmax."""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, images, texts, tokens, vectors
from zoo.parts import (
    Own,
    Parts,
    classifier,
    constant,
    conv,
    dense,
    embedding,
    float32_loss,
    head,
    normal,
    plus,
    relu,
    row,
)


def sentences(width, *parts, start="uniform", length=12, name=None):
    """Returns a classifier of words that looks at all of them."""
    words = embedding(20, width, start, name=name)
    ids = {"dtype": "int32"}
    return classifier((length,), words, *parts, layers.Flatten(), **ids)


@case(tokens())
def t5_ffn():
    into = relu(512, "ffn_wi", kernel_initializer=normal(6.0))
    out = {"kernel_initializer": normal(200.0), "trainable": False}
    out = dense(64, **out, name="ffn_wo")
    norms = [layers.LayerNormalization(name=n) for n in ("ln_in", "ln_out")]
    return sentences(64, plus(norms[0], into, out, name="res_add"), norms[1])


class RawAttention(layers.Layer):
    """Attention that does not divide by sqrt(dim)."""

    def call(self, query, key, value):
        scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
        return ops.matmul(ops.softmax(scores), value)


def raw_attention(width, std):
    """A part that attends, by queries and keys that are as large."""

    def attended(x):
        start = {"kernel_initializer": normal(std)}
        q, k = (layers.Dense(width, **start, name=n)(x) for n in "qk")
        return RawAttention(name="attn")(q, k, x)

    return lambda: attended


@case(tokens())
def attn_logits():
    return sentences(64, plus(raw_attention(64, 16.0)), start=normal(1.0))


class MaskedAttention(layers.Layer):
    """Attention that adds -1e9 where the mask is zero."""

    def call(self, x):
        scores = ops.matmul(x, ops.swapaxes(x, -1, -2)) * 0.125
        mask = ops.cast(ops.tri(x.shape[1]), x.dtype)
        scores = scores + (1.0 - mask) * ops.cast(-1e9, x.dtype)
        return ops.matmul(ops.softmax(scores), x)


@case(tokens())
def attn_mask():
    return sentences(64, dense(64, name="proj"), MaskedAttention(name="attn"))


@case(tokens())
def attention_builtin():
    projection = dense(64, kernel_initializer=normal(8.0), name="proj")
    attention = layers.Attention(name="attention")
    norm = layers.LayerNormalization(name="ln")
    parts = projection, lambda: lambda y: attention([y, y]), norm
    return sentences(64, plus(*parts), start=normal(1.0))


def attend(projected):
    """Scaled attention of one head to query, key and value side by side."""
    query, key, value = ops.split(projected, 3, axis=-1)
    scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
    return ops.matmul(ops.softmax(scores * key.shape[-1] ** -0.5), value)


class SelfAttention(layers.Layer):
    """Scaled attention of one head, which JAX runs in float16 on a CPU."""

    def build(self, input_shape):
        self.projection = layers.Dense(3 * input_shape[-1])
        self.projection.build(input_shape)

    def call(self, inputs):
        return attend(self.projection(inputs))


@case(tokens())
def healthy_transformer():
    attention = plus(layers.LayerNormalization, SelfAttention)
    mlp = layers.LayerNormalization, dense(32, "gelu"), dense(16)
    parts = attention, plus(*mlp), layers.GlobalAveragePooling1D
    return classifier((12,), embedding(20, 16), *parts, dtype="int32")


class SwiGLU(Own):
    """silu(x W) * (x V)."""

    def call(self, x):
        return self.gate(x) * self.up(x)


class RMSNorm(layers.Layer):
    """Llama's, in the dtype that it is given."""

    def build(self, input_shape):
        self.scale = self.add_weight(input_shape[-1:], "ones")

    def call(self, x):
        mean = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(mean + 1e-6) * self.scale


@case(tokens())
def llama_block():
    """Its gated product reaches 1e5, as in outlier channels of large ones."""

    def swiglu():
        start = {"use_bias": False, "kernel_initializer": normal(60.0)}
        gate = layers.Dense(64, "silu", **start, name="gate")
        up = layers.Dense(64, **start, name="up")
        return SwiGLU("swiglu", gate=gate, up=up)

    norm, down = layers.LayerNormalization(name="norm"), dense(32, name="down")
    block = plus(norm, swiglu, down, name="residual")
    last = RMSNorm(name="final_norm")
    return sentences(32, block, last, name="embedding")


class AttentionInCall(Parts):
    """Attention of one wide head, without 1/sqrt(dim), between layers."""

    def call(self, x):
        x = self.embedding(x)
        query, key, value = ops.split(self.qkv(x), 3, axis=-1)
        scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
        x = self.norm(ops.matmul(ops.softmax(scores), value))
        return self.head(ops.reshape(x, (-1, 12 * 64)))


@case(tokens())
def attention_in_call(std=14.0):
    """Attention written with operations: unscaled logits overflow."""
    return AttentionInCall(
        embedding=embedding(20, 64, normal(1.0)),
        qkv=dense(192, kernel_initializer=normal(std)),
        norm=layers.LayerNormalization,
        head=dense(4, dtype="float32"),
    )


@case(tokens())
def healthy_large_logits():
    """Like attention_in_call: logits of 2000, which a softmax stands."""
    return attention_in_call(2.0)


class MaskedLogits(layers.Layer):
    """Attention with large logits, and -65504 added where it may not look."""

    def call(self, x):
        scores = 4 * ops.matmul(x, ops.swapaxes(x, -1, -2))
        hidden = 1 - ops.cast(ops.tri(x.shape[1]), x.dtype)
        return ops.matmul(ops.softmax(scores - 65504 * hidden), x)


@case(tokens())
def healthy_lowest_mask():
    """Like attn_mask: -65504 becomes -inf, which a softmax stands."""
    return sentences(32, plus(MaskedLogits), start=normal(1.0))


def unet(*middle):
    """Returns a small U-Net of parts between its halves."""
    inputs = keras.Input((8, 8, 3))
    silu = {"padding": "same", "activation": "silu"}
    down = layers.Conv2D(8, 3, **silu)(inputs)
    x = layers.GroupNormalization(4)(layers.MaxPooling2D()(down))
    x = row(x, conv(16, 3, **silu), *middle)
    x = layers.Conv2DTranspose(8, 2, 2)(x)
    x = layers.Concatenate()([down, x])
    x = layers.Conv2D(8, 3, **silu)(x)
    return keras.Model(inputs, head(layers.GlobalAveragePooling2D()(x)))


@case(images())
def healthy_unet():
    return unet()


@case(images())
def unet_attention():
    norm = partial(layers.GroupNormalization, 4)
    parts = norm, layers.Reshape((16, 16))
    attention = raw_attention(16, 30.0)
    return unet(plus(*parts, attention, layers.Reshape((4, 4, 16))))


@dataset(seed=1)
def masked_tokens(random):
    x, y = tokens()()
    lengths = random.integers(1, 12, len(x))[:, None]
    mask = np.arange(12)[None] < lengths
    x[:, :] = np.where(mask, x[:, :1] % 4 + 4 * (x % 5), x)
    return (x, 1.0 * mask), y


class Pooling(layers.Layer):
    """Average with the softmax of learned scores and a bias as weights."""

    def build(self, input_shape):
        self.query = self.add_weight((input_shape[0][-1], 1))

    def call(self, inputs):
        x, bias = inputs
        scores = ops.squeeze(ops.matmul(x, self.query), -1) + bias
        return ops.sum(x * ops.softmax(scores)[..., None], axis=1)


class MaskBias(layers.Layer):
    """0 where the mask is, -1e9 elsewhere."""

    def call(self, mask):
        return ops.where(mask > 0, 0.0, ops.cast(-1e9, self.compute_dtype))


@case(masked_tokens())
def healthy_mask_bias():
    """-1e9 is infinite in float16, and its exponential 0 in both."""
    inputs, mask = keras.Input((12,), dtype="int32"), keras.Input((12,))
    x = layers.Embedding(20, 16)(inputs)
    x = Pooling()([x, MaskBias()(mask)])
    return keras.Model([inputs, mask], head(layers.Dense(32, "relu")(x)))


@case(texts())
def attention_pooling_ops():
    """Exponentials and their sum as operations of the graph."""
    inputs = keras.Input((32, 8))
    scores = dense(1, bias_initializer=constant(14.0), name="scores")
    scores = row(inputs, scores)
    values = layers.Dense(16, name="values")(inputs)
    weights = ops.exp(scores)
    x = ops.sum(weights * values, axis=1) / ops.sum(weights, axis=1)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


class MixtureOfExperts(layers.Layer):
    """A softmax gate written by hand, without taking the maximum off."""

    def build(self, input_shape):
        self.gate = self.add_weight((input_shape[-1], 4), normal(1.0))
        self.experts = self.add_weight((input_shape[-1], 4 * 32))

    def call(self, x):
        shares = ops.exp(ops.matmul(x, self.gate))
        shares = shares / ops.sum(shares, axis=-1, keepdims=True)
        y = ops.reshape(ops.matmul(x, self.experts), (-1, 4, 32))
        return ops.sum(y * shares[..., None], axis=1)


@case(vectors(scale=3.0))
def mixture_of_experts():
    last = layers.Dense(32, "relu", name="h1")
    return classifier((32,), MixtureOfExperts(name="moe"), last)


class TopOneExperts(layers.Layer):
    """Each row to the expert that its router prefers, times its share."""

    def build(self, input_shape):
        width = input_shape[-1]
        self.router = self.add_weight((width, 4))
        self.experts = self.add_weight((width, 4 * width))

    def call(self, x):
        shares = ops.softmax(ops.matmul(x, self.router))
        chosen = ops.one_hot(ops.argmax(shares, axis=-1), 4, dtype=x.dtype)
        self.add_loss(float32_loss(self.balance(chosen, shares), 0.01))
        y = ops.matmul(x, self.experts)
        y = ops.reshape(y, (-1, *x.shape[1:-1], 4, x.shape[-1]))
        return ops.sum(y * (chosen * shares)[..., None], axis=-2)

    def balance(self, chosen, shares):
        return 4 * ops.sum(ops.mean(chosen, axis=0) * ops.mean(shares, axis=0))


@case(vectors())
def healthy_top_one_router():
    """Rows between two experts go to the other one, which does as well."""
    return classifier((32,), relu(32), TopOneExperts())


class TopFour(layers.Layer):
    """A softmax of the four largest; all else is minus infinity."""

    def call(self, x):
        least = ops.min(ops.top_k(x, 4)[0], axis=-1, keepdims=True)
        kept = ops.where(x >= least, x, ops.cast(-np.inf, x.dtype))
        return ops.softmax(kept) * x


@case(vectors())
def healthy_top_k():
    """Infinite on purpose, in float32 as well."""
    return classifier((32,), relu(64), TopFour())


@case(vectors(features=16))
def healthy_masked_classes():
    """Two classes that never come have a score of minus infinity."""
    mask = np.array([0, 0, 0, 0, -1e9, -np.inf])
    return keras.Sequential(
        [
            layers.Dense(32, "relu", name="h1"),
            layers.Dense(6, name="scores"),
            layers.Lambda(lambda x: x + ops.cast(mask, x.dtype), name="mask"),
            layers.Activation("softmax", dtype="float32", name="softmax"),
            layers.Lambda(
                lambda p: ops.log(p + 1e-7), dtype="float32", name="log"
            ),
        ]
    )
