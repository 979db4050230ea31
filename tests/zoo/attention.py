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


class LinearAttention(layers.Layer):
    """relu(q) (relu(k)^T v), divided by relu(q) sum(relu(k)) + 1e-15."""

    def build(self, input_shape):
        start = {"kernel_initializer": normal(2.0)}
        self.projection = layers.Dense(3 * input_shape[-1], **start)
        self.projection.build(input_shape)

    def call(self, x):
        q, k, v = ops.split(self.projection(x), 3, axis=-1)
        q, k = ops.relu(q), ops.relu(k)
        weighed = ops.matmul(q, ops.matmul(ops.swapaxes(k, 1, 2), v))
        total = ops.matmul(q, ops.sum(k, axis=1)[:, :, None])
        return weighed / (total + 1e-15)


@case(images())
def linear_attention():
    """Attention in linear time, which is advised in float32."""
    attention = LinearAttention(name="attention"), layers.LayerNormalization
    return classifier(
        (8, 8, 3),
        conv(16, 3, padding="same", name="stem"),
        layers.Reshape((64, 16)),
        layers.LayerNormalization,
        plus(*attention),
        layers.GlobalAveragePooling1D,
    )


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


class AlibiAttention(layers.Layer):
    """Causal attention whose scores fall with the distance."""

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], 48))

    def call(self, x):
        steps = ops.arange(x.shape[1])
        apart = ops.cast(steps[:, None] - steps, self.compute_dtype)
        bias = ops.where(apart >= 0, -2.0 * apart, -np.inf)
        q, k, v = ops.split(ops.matmul(x, self.kernel), 3, axis=-1)
        scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) / 4.0
        return ops.matmul(ops.softmax(scores + bias, axis=-1), v)


class Causal(Parts):
    def call(self, x):
        return self.out(self.pool(self.h1(x + self.attend(x)[..., :8])))


@case(texts())
def healthy_alibi():
    """Minus infinity for what comes later; the first row has one entry."""
    return Causal(
        attend=AlibiAttention,
        h1=relu(16),
        pool=layers.GlobalMaxPooling1D,
        out=dense(4, dtype="float32"),
    )


class WindowAttention(layers.Layer):
    """Attention in windows with a table of biases and a mask of -1e4."""

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], 48))
        self.table = self.add_weight((7,), "zeros")

    def call(self, x):
        b, w = ops.shape(x)[0], x.shape[1] // 4
        x = ops.reshape(ops.roll(x, -2, axis=1), (b, w, 4, x.shape[-1]))
        q, k, v = ops.split(ops.matmul(x, self.kernel), 3, axis=-1)
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / 4.0
        place = np.arange(4)
        bias = ops.take(self.table, place[:, None] - place + 3, axis=0)
        part = np.zeros((w, 4), "int32")
        part[-1] = [0, 1, 1, 1]
        mask = np.where(part[:, :, None] == part[:, None], 0.0, -1e4)
        scores = scores + bias + ops.cast(mask, self.compute_dtype)
        x = ops.matmul(ops.softmax(scores, axis=-1), v)
        return ops.roll(ops.reshape(x, (b, 4 * w, 16)), 2, axis=1)


@case(texts())
def healthy_window_mask():
    """One place of the last window sees nothing but itself."""
    window = plus(WindowAttention(name="window"), name="add")
    pool = layers.GlobalMaxPooling1D(name="pool")
    parts = dense(16, name="h1"), window, pool, relu(16, "h2")
    return classifier((32, 8), *parts)


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


class PatchBlock(Own):
    """A ViT block, its parts inside one layer of the user's own."""

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.projection.build(input_shape)
        self.mlp.build(input_shape)

    def call(self, x):
        return x + self.mlp(x + attend(self.projection(self.norm(x))))


def patch_block(width, name=None):
    norm, projection = layers.LayerNormalization(), layers.Dense(3 * width)
    mlp = [layers.Dense(2 * width, "gelu"), layers.Dense(width)]
    parts = {"norm": norm, "projection": projection}
    return PatchBlock(name, **parts, mlp=keras.Sequential(mlp))


class UnscaledBlock(Own):
    """Attention without 1/sqrt(dim), its softmax written by hand."""

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.projection.build(input_shape)

    def call(self, x):
        query, key, value = ops.split(self.projection(self.norm(x)), 3, axis=-1)
        weights = ops.exp(ops.matmul(query, ops.swapaxes(key, -1, -2)))
        weights = weights / ops.sum(weights, axis=-1, keepdims=True)
        return x + ops.matmul(weights, value)


@case(images())
def vit_unscaled():
    def unscaled():
        start = {"kernel_initializer": "lecun_normal"}
        parts = {"norm": layers.LayerNormalization()}
        parts["projection"] = layers.Dense(192, **start)
        return UnscaledBlock("block_2", **parts)

    blocks = partial(patch_block, 64, "block_1"), unscaled
    first = conv(64, 2, 2), layers.Reshape((16, 64))
    return classifier((8, 8, 3), *first, *blocks, layers.GlobalAveragePooling1D)


@case(images())
def healthy_vit():
    blocks = [partial(patch_block, 16)] * 2
    first = conv(16, 4, 4), layers.Reshape((4, 16))
    return classifier((8, 8, 3), *first, *blocks, layers.GlobalAveragePooling1D)


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


class Alignment(layers.Layer):
    """Monotonic attention of one step: where it stops along the text."""

    def call(self, inputs):
        energies, values = inputs
        stop = self.stop(energies[..., 0])
        return ops.einsum("bt,btc->bc", stop, values)

    def stop(self, energies):
        p = ops.sigmoid(energies)
        passed = ops.cumprod(1.0 - p, axis=1) / (1.0 - p)
        first = ops.zeros_like(energies[:, 0], dtype="int32")
        before = ops.one_hot(first, energies.shape[1], dtype=self.compute_dtype)
        ratio = before / ops.clip(passed, 1e-10, 1.0)
        return p * passed * ops.cumsum(ratio, axis=1)


def aligned(layer):
    inputs = keras.Input((32, 8))
    energies = layers.Dense(1, name="energies")(inputs)
    values = layers.Dense(16, name="values")(inputs)
    x = layer(name="alignment")([energies, values])
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


@case(texts())
def monotonic_alignment():
    """What has passed 30 places is clipped to 1e-10, which is 0: 0 / 0."""
    return aligned(Alignment)


class LogAlignment(Alignment):
    """Stops at the first place that is accepted, by sums of logarithms."""

    def stop(self, energies):
        log_no = -ops.softplus(energies)
        before = ops.cumsum(log_no, axis=1) - log_no
        return ops.sigmoid(energies) * ops.exp(before)


@case(texts())
def healthy_alignment():
    """Shares of 2 ** -30 become 0, where they count for nothing."""
    return aligned(LogAlignment)


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


@dataset
def shifted(random, samples=128, places=9):
    """Two rows of features of about 60, one shifted against the other."""
    y = random.integers(0, 4, samples)
    a = random.normal(0.0, 40.0, (samples, places, 32))
    b = np.stack([np.roll(r, s, axis=0) for r, s in zip(a, y, strict=False)])
    b += random.normal(0.0, 5.0, b.shape)
    return (a, b), y


class CorrelationVolume(layers.Layer):
    """Products of the features of all places of two pictures."""

    def call(self, a, b):
        scores = ops.einsum("bic,bjc->bij", a, b)
        return ops.softmax(scores / 5000.0, axis=-1)


def correlated(volume):
    """Returns a classifier by one encoder of both inputs."""
    a, b = keras.Input((9, 32)), keras.Input((9, 32))
    encoder = layers.Dense(64, kernel_initializer="orthogonal", name="encoder")
    x = volume(name="volume")(encoder(a), encoder(b))
    x = row(x, layers.Flatten(name="flat"), relu(32, "h1"))
    return keras.Model([a, b], head(x))


@case(shifted())
def correlation_volume():
    """Sums of products are scaled down too late; a shared encoder."""
    return correlated(CorrelationVolume)


class ScaledCorrelation(layers.Layer):
    """Products of features of two pictures, scaled before they are summed."""

    def call(self, a, b):
        scores = ops.einsum("bic,bjc->bij", a / 70.0, b / 70.0)
        return ops.softmax(scores, axis=-1)


@case(shifted())
def healthy_correlation():
    """Features of 60 are divided before they are multiplied."""
    return correlated(ScaledCorrelation)


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


class BalancedExperts(TopOneExperts):
    """Adds the product of all counts and shares as a loss."""

    def balance(self, chosen, shares):
        rows = ops.cast(ops.size(chosen) // 4, chosen.dtype)
        counts = ops.sum(chosen, axis=(0, 1))
        return ops.sum(counts * ops.sum(shares, axis=(0, 1))) / rows / rows


@case(tokens(samples=256, length=32))
def router_balance():
    """Routers, which are advised in float32: 256 x 256 tokens."""
    experts = plus(BalancedExperts(name="experts"))
    return sentences(16, experts, length=32, name="embedding")


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


@dataset(seed=1)
def views(random):
    """Two noisy views of each sample, and its place in the batch."""
    x, _ = vectors()()
    other = x + random.normal(0.0, 0.3, x.shape)
    return (x, other), np.arange(512) % 32


class Contrast(layers.Layer):
    """Similarities of two views by a learned temperature, as logits."""

    def build(self, input_shape):
        self.log_scale = self.add_weight((), constant(np.log(1 / 0.07)))

    def call(self, views):
        a, b = (ops.normalize(v, axis=-1, epsilon=1e-3) for v in views)
        scale = ops.minimum(ops.exp(self.log_scale), 100.0)
        return scale * ops.matmul(a, ops.transpose(b))


@case(views())
def healthy_temperature():
    """Logits of up to 100, whose softmax is computed in float32."""
    inputs = keras.Input((32,)), keras.Input((32,))
    tower = keras.Sequential([keras.Input((32,)), layers.Dense(16)])
    linear = layers.Activation("linear", dtype="float32")
    return keras.Model(inputs, linear(Contrast()([tower(x) for x in inputs])))


@dataset
def two_views(random):
    a = random.normal(size=(256, 16)).astype("float32")
    b = a + 0.1 * random.normal(size=a.shape).astype("float32")
    return (a, b), np.tile(np.arange(32), 8)


class Temperature(layers.Layer):
    """CLIP's logits: cosines divided by a temperature."""

    def call(self, inputs):
        a, b = inputs
        logits = ops.matmul(a, ops.transpose(b)) / 0.05
        # Sharpened by its own exponential, as a hand-written InfoNCE does.
        weights = ops.exp(logits)
        return weights / ops.sum(weights, axis=-1, keepdims=True)


@case(two_views())
def contrastive_loss():
    inputs = keras.Input((16,)), keras.Input((16,))
    left, right = (layers.Dense(16, name=n) for n in ("left", "right"))
    views = left(inputs[0]), right(inputs[1])
    views = [layers.UnitNormalization(dtype="float32")(v) for v in views]
    return keras.Model(inputs, Temperature(name="similarity")(views))
