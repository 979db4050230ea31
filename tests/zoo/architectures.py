"""Parts of real architectures, written after the thresholds were frozen."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import attend, head, images, tokens
from zoo.faults import before_mlp, normal


class RMSNorm(layers.Layer):
    """Llama's, in the dtype that it is given."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=input_shape[-1:], initializer="ones")

    def call(self, x):
        mean = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(mean + 1e-6) * self.scale


class SwiGLU(layers.Layer):
    """silu(x W) * (x V)."""

    def __init__(self, units, std, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(units, "silu", False, normal(std), name="gate")
        self.up = layers.Dense(
            units, use_bias=False, kernel_initializer=normal(std), name="up"
        )

    def build(self, input_shape):
        self.gate.build(input_shape)
        self.up.build(input_shape)

    def call(self, x):
        return self.gate(x) * self.up(x)


@case(
    data=tokens(),
    culprits=frozenset({"swiglu", "down", "residual", "final_norm"}),
    kind="forward_overflow",
    direction="forward",
    decoy="embedding",
)
def llama_block():
    """Its gated product reaches 1e5, as in outlier channels of large ones."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 32, name="embedding")(inputs)
    y = layers.LayerNormalization(name="norm")(x)
    y = SwiGLU(64, 60.0, name="swiglu")(y)
    y = layers.Dense(32, name="down")(y)
    x = layers.Add(name="residual")([x, y])
    x = RMSNorm(name="final_norm")(x)
    return keras.Model(inputs, head(layers.Flatten()(x)))


class ScaledResidual(layers.Layer):
    """x + gain * conv(x), without a norm."""

    def __init__(self, filters, gain, **kwargs):
        super().__init__(**kwargs)
        self.gain = gain
        self.conv = layers.Conv2D(
            filters, 3, padding="same", kernel_initializer="he_normal"
        )

    def build(self, input_shape):
        self.conv.build(input_shape)

    def call(self, x):
        return x + self.gain * self.conv(ops.relu(x))


@case(
    data=images(),
    culprits=frozenset({"block_5"}),
    kind="forward_overflow",
    direction="forward",
    decoy="block_1",
)
def conv_stack_without_norm():
    """Like the decoder of SDXL's autoencoder, which needs bfloat16."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", name="stem")(inputs)
    for index, gain in enumerate([4.0, 4.0, 4.0, 4.0, 500.0], 1):
        x = ScaledResidual(8, gain, name=f"block_{index}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, head(layers.GlobalAveragePooling2D()(x)))


class Temperature(layers.Layer):
    """CLIP's logits: cosines divided by a temperature."""

    def __init__(self, temperature, **kwargs):
        super().__init__(**kwargs)
        self.temperature = temperature

    def call(self, inputs):
        a, b = inputs
        logits = ops.matmul(a, ops.transpose(b)) / self.temperature
        # Sharpened by its own exponential, as a hand-written InfoNCE does.
        weights = ops.exp(logits)
        return weights / ops.sum(weights, axis=-1, keepdims=True)


def two_views():
    random = np.random.default_rng(0)
    a = random.normal(size=(256, 16)).astype("float32")
    b = a + 0.1 * random.normal(size=a.shape).astype("float32")
    return (a, b), np.tile(np.arange(32), 8).astype("int32")


@case(
    data=two_views,
    culprits=frozenset({"similarity"}),
    kind="forward_overflow",
    direction="forward",
    decoy="left",
    loss="sparse_categorical_crossentropy",
    epochs=30,
)
def contrastive_loss():
    left, right = keras.Input((16,)), keras.Input((16,))
    a = layers.Dense(16, name="left")(left)
    b = layers.Dense(16, name="right")(right)
    a = layers.UnitNormalization(dtype="float32")(a)
    b = layers.UnitNormalization(dtype="float32")(b)
    return keras.Model(
        [left, right], Temperature(0.05, name="similarity")([a, b])
    )


class KLDivergence(layers.Layer):
    """Adds -0.5 mean(1 + logvar - mean^2 - exp(logvar)) to the loss."""

    def call(self, inputs):
        mean, logvar = inputs
        kl = 1 + logvar - ops.square(mean) - ops.exp(logvar)
        # TensorFlow adds no float16 losses to float32 ones.
        self.add_loss(ops.cast(-ops.mean(kl), "float32") * 1e-6)
        return mean


def wide_vectors():
    x, _ = vectors()()
    return x * 4, x


@case(
    data=wide_vectors,
    culprits=frozenset({"kl"}),
    kind="forward_overflow",
    direction="forward",
    decoy="mean",
    loss="mse",
    metric="loss",
)
def vae():
    inputs = keras.Input((32,))
    x = layers.Dense(32, "tanh", name="encoder")(inputs)
    mean = layers.Dense(8, name="mean")(x)
    logvar = layers.Dense(
        8, name="logvar", bias_initializer=keras.initializers.Constant(11.5)
    )(x)
    x = KLDivergence(name="kl")([mean, logvar])
    return keras.Model(inputs, layers.Dense(32, dtype="float32")(x))


class MixtureOfExperts(layers.Layer):
    """A softmax gate written by hand, without taking the maximum off."""

    def __init__(self, experts, units, **kwargs):
        super().__init__(**kwargs)
        self.units, self.count = units, experts

    def build(self, input_shape):
        self.gate = self.add_weight(
            shape=(input_shape[-1], self.count), initializer=normal(1.0)
        )
        self.experts = self.add_weight(
            shape=(input_shape[-1], self.count * self.units),
            initializer="glorot_uniform",
        )

    def call(self, x):
        shares = ops.exp(ops.matmul(x, self.gate))
        shares = shares / ops.sum(shares, axis=-1, keepdims=True)
        y = ops.reshape(
            ops.matmul(x, self.experts), (-1, self.count, self.units)
        )
        return ops.sum(y * shares[..., None], axis=1)


@case(
    data=vectors(scale=3.0),
    culprits=frozenset({"moe"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
)
def mixture_of_experts():
    return before_mlp(MixtureOfExperts(4, 32, name="moe"), 32)


@case(data=tokens(), optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_bidirectional():
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs)
    x = layers.Bidirectional(layers.GRU(8, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(8, "relu"))(x)
    return keras.Model(inputs, head(layers.Flatten()(x)))


class PatchBlock(layers.Layer):
    """A ViT block, its parts inside one layer of the user's own."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.projection = layers.Dense(3 * width)
        self.mlp = keras.Sequential(
            [layers.Dense(2 * width, "gelu"), layers.Dense(width)]
        )

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.projection.build(input_shape)
        self.mlp.build(input_shape)

    def call(self, x):
        return x + self.mlp(x + attend(self.projection(self.norm(x))))


@case(data=images())
def healthy_vit():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 4, 4)(inputs)
    x = layers.Reshape((4, 16))(x)
    for _ in range(2):
        x = PatchBlock(16)(x)
    return keras.Model(inputs, head(layers.GlobalAveragePooling1D()(x)))


@case(data=images())
def healthy_unet():
    inputs = keras.Input((8, 8, 3))
    down = layers.Conv2D(8, 3, padding="same", activation="silu")(inputs)
    x = layers.GroupNormalization(4)(layers.MaxPooling2D()(down))
    x = layers.Conv2D(16, 3, padding="same", activation="silu")(x)
    x = layers.Conv2DTranspose(8, 2, 2)(x)
    x = layers.Concatenate()([down, x])
    x = layers.Conv2D(8, 3, padding="same", activation="silu")(x)
    return keras.Model(inputs, head(layers.GlobalAveragePooling2D()(x)))
