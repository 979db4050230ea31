"""Look-alikes of the layers that users write, sound in float16."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head, images, tokens
from zoo.everyday_layers import loads
from zoo.faults import before_mlp


def spoken(samples=96, length=24):
    """Frames of sound and the letters that are spoken."""
    random = np.random.default_rng(0)
    y = random.integers(1, 6, (samples, 4)).astype("int32")
    x = np.repeat(np.eye(6, dtype="float32")[y], length // 4, axis=1)
    return x + random.normal(0.0, 0.2, x.shape).astype("float32"), y


@case(
    data=spoken,
    loss=keras.losses.CTC(),
    metric="loss",
    initial_scale=2.0**10,
    optimizer=lambda: keras.optimizers.Adam(0.01),
)
def healthy_ctc():
    """Keras computes the loss in float32, as sums of logarithms."""
    inputs = keras.Input((24, 6))
    x = layers.Conv1D(16, 3, padding="same", activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(7, dtype="float32")(x))


class WeightNormalized(layers.Layer):
    """A dense layer whose columns have learned lengths."""

    def build(self, input_shape):
        self.direction = self.add_weight(shape=(input_shape[-1], 64))
        self.length = self.add_weight(shape=(64,), initializer="ones")

    def call(self, x):
        norm = ops.sqrt(ops.sum(ops.square(self.direction), axis=0) + 1e-7)
        return ops.relu(ops.matmul(x, self.direction * self.length / norm))


@case(data=vectors())
def healthy_weight_normalization():
    """Lengths of about 1, whose squares are numbers in float16."""
    return before_mlp(WeightNormalized())


class Contrast(layers.Layer):
    """Similarities of two views by a learned temperature, as logits."""

    def build(self, input_shape):
        self.log_scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(np.log(1 / 0.07))
        )

    def call(self, views):
        a, b = (ops.normalize(v, axis=-1, epsilon=1e-3) for v in views)
        scale = ops.minimum(ops.exp(self.log_scale), 100.0)
        return scale * ops.matmul(a, ops.transpose(b))


def views():
    """Two noisy views of each sample, and its place in the batch."""
    x, _ = vectors()()
    random = np.random.default_rng(1)
    other = x + random.normal(0.0, 0.3, x.shape)
    return (x, other.astype("float32")), np.arange(512) % 32


@case(data=views)
def healthy_temperature():
    """Logits of up to 100, whose softmax is computed in float32."""
    a, b = keras.Input((32,)), keras.Input((32,))
    tower = keras.Sequential([keras.Input((32,)), layers.Dense(16)])
    logits = Contrast()([tower(a), tower(b)])
    return keras.Model(
        [a, b], layers.Activation("linear", dtype="float32")(logits)
    )


class Transmittance(layers.Layer):
    """What passes all the samples of a ray before each one, times its own."""

    def call(self, x):
        density, colours = ops.softplus(x[..., :1]), x[..., 1:]
        before = ops.cumsum(density, axis=1) - density
        weights = ops.exp(-before) * (1 - ops.exp(-density))
        return ops.sum(weights * colours, axis=1)


@case(data=images(), epochs=30, optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_volume_rendering():
    """Sums of up to 60, and exponentials that may be 0."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((64, 3))(inputs)
    x = layers.Dense(32, "relu")(x)
    return keras.Model(inputs, head(Transmittance()(layers.Dense(9)(x))))


class SoftMaximum(layers.Layer):
    """The logarithm of the mean exponential, less the maximum first."""

    def call(self, x):
        return (ops.logsumexp(5.0 * x, axis=1) - np.log(x.shape[1])) / 5.0


@case(data=loads, optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_log_sum_exp():
    """The exponentials are those of differences, all of them below 1."""
    inputs = keras.Input((400, 1))
    x = layers.Rescaling(0.1, offset=-25.0)(inputs)
    x = layers.AveragePooling1D(20)(x)
    x = SoftMaximum()(layers.Conv1D(16, 3)(x))
    return keras.Model(inputs, head(layers.Dense(16, "relu")(x)))


class RunningMean(layers.Layer):
    """The mean of all steps until each one, updated step by step."""

    def call(self, x):
        means = [x[:, 0]]
        for step in range(1, x.shape[1]):
            means.append(means[-1] + (x[:, step] - means[-1]) / (step + 1))
        return ops.stack(means, axis=1)


@case(data=tokens(), optimizer=lambda: keras.optimizers.Adam(0.01))
def healthy_cumulative_mean():
    """A mean that is updated grows no further than what it is of."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16, embeddings_initializer="normal")(inputs)
    return keras.Model(inputs, head(layers.Flatten()(RunningMean()(x))))


@case(data=images(), batch_size=1, samples=1, epochs=3)
def healthy_batch_of_one():
    """Instances are normalized by themselves."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, activation="relu")(inputs)
    x = layers.GroupNormalization(-1)(x)
    x = layers.Conv2D(16, 3, activation="relu")(x)
    return keras.Model(inputs, head(layers.GlobalAveragePooling2D()(x)))
