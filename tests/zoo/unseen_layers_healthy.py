"""Look-alikes of the layers of unseen_layers.py, sound in float16."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head
from zoo.more_unseen_layers import boxes, texts
from zoo.reported_losses import float32_loss
from zoo.unseen_layers import (
    MinMax,
    adam,
    patterns,
    photographs,
    shifted,
    weighted_graphs,
)


class CubicGelu(layers.Layer):
    """GELU by its cubic; the cube of 50 is infinite, its tanh is 1."""

    def call(self, x):
        cube = x * x * x
        return 0.5 * x * (1.0 + ops.tanh(0.8 * (x + 0.0447 * cube)))


@case(data=vectors(scale=50.0))
def healthy_cubic_gelu():
    """An infinity that a tanh makes 1, forward; its slope is 0 backward."""
    inputs = keras.Input((32,))
    x = CubicGelu(name="gelu")(layers.Dense(64, name="h1")(inputs))
    x = layers.Rescaling(0.02, name="scale")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


class TimeEmbedding(layers.Layer):
    """Sines and cosines of a time of 0 to 999 in ten frequencies."""

    def call(self, t):
        k = ops.cast(ops.arange(16), self.compute_dtype)
        angle = t * ops.exp(-np.log(10000.0) / 16 * k)
        return ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)


def noised(samples=512):
    """Noisy vectors, and the time that tells how much of them is noise."""
    random = np.random.default_rng(0)
    t = random.integers(0, 1000, (samples, 1))
    share = np.cos(t / 1000.0 * np.pi / 2)
    clean = random.normal(size=(samples, 8))
    noise = random.normal(size=(samples, 8))
    x = share * clean + np.sqrt(1 - share**2) * noise
    return {
        "x": x.astype("float32"),
        "t": t.astype("float32"),
    }, noise.astype("float32")


@case(data=noised, loss="mse", metric="loss", optimizer=adam)
def healthy_time_embedding():
    """Angles of up to 1000, off by half, and a number of the time still."""
    x, t = keras.Input((8,), name="x"), keras.Input((1,), name="t")
    time = TimeEmbedding(name="time")(t)
    time = layers.Dense(32, "silu", name="time_mlp")(time)
    h = layers.Dense(32, name="h1")(x)
    h = layers.Add(name="add")([h, time])
    h = layers.Dense(32, "silu", name="h2")(h)
    return keras.Model({"x": x, "t": t}, head(h, 8))


class AlibiAttention(layers.Layer):
    """Causal attention whose scores fall with the distance."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 48))

    def call(self, x):
        steps = ops.arange(x.shape[1])
        apart = ops.cast(steps[:, None] - steps, self.compute_dtype)
        bias = ops.where(apart >= 0, -2.0 * apart, -np.inf)
        q, k, v = ops.split(ops.matmul(x, self.kernel), 3, axis=-1)
        scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) / 4.0
        return ops.matmul(ops.softmax(scores + bias, axis=-1), v)


class Causal(keras.Model):
    def __init__(self):
        super().__init__()
        self.attend = AlibiAttention(name="attend")
        self.h1 = layers.Dense(16, "relu", name="h1")
        self.pool = layers.GlobalMaxPooling1D(name="pool")
        self.out = layers.Dense(4, dtype="float32", name="out")

    def call(self, x):
        return self.out(self.pool(self.h1(x + self.attend(x)[..., :8])))


@case(data=texts, optimizer=adam)
def healthy_alibi():
    """Minus infinity for what comes later; the first row has one entry."""
    return Causal()


class Squash(layers.Layer):
    """Squashes lengths, with an epsilon that float16 does not have."""

    def call(self, x):
        length2 = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return length2 / (1 + length2) * x / ops.sqrt(length2 + 1e-8)


@case(data=vectors(), optimizer=adam)
def healthy_squash():
    """Lengths of about 3: the epsilon is never needed."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, name="h1")(inputs)
    x = Squash(name="squash")(layers.Reshape((8, 8), name="capsules")(x))
    return keras.Model(inputs, head(layers.Flatten(name="flat")(x)))


class MeanResponse(layers.Layer):
    """Weighs channels by their root mean square, over that of all."""

    def call(self, x):
        norm = ops.sqrt(
            ops.mean(ops.square(x), axis=(1, 2), keepdims=True) + 1e-6
        )
        weight = norm / (ops.mean(norm, axis=-1, keepdims=True) + 1e-6)
        return x * weight + x


@case(data=photographs, optimizer=adam, epochs=40, initial_scale=2.0**10)
def healthy_response_norm():
    """Pixels are scaled first, and squares are averaged."""
    inner = keras.Input((8, 8, 3))
    x = layers.Rescaling(1 / 127.5, offset=-1.0, name="scale")(inner)
    x = layers.Conv2D(16, 3, activation="relu", name="conv")(x)
    x = MeanResponse(name="response")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    encoder = keras.Model(inner, x, name="encoder")
    inputs = keras.Input((8, 8, 3))
    flipped = layers.Permute((2, 1, 3), name="flip")(inputs)
    x = layers.Add(name="both")([encoder(inputs), encoder(flipped)])
    return keras.Model(inputs, head(x))


class ScaledOverlap(layers.Layer):
    """Adds 1 less the overlap of boxes, in parts of the picture."""

    def call(self, inputs):
        found, true = inputs
        true = true / 640.0
        found = ops.concatenate(
            [found[:, :2], found[:, :2] + ops.relu(found[:, 2:]) + 0.01], -1
        )
        low = ops.maximum(found[:, :2], true[:, :2])
        high = ops.minimum(found[:, 2:], true[:, 2:])
        both = ops.prod(ops.relu(high - low), axis=-1)
        one = ops.prod(found[:, 2:] - found[:, :2], axis=-1)
        other = ops.prod(true[:, 2:] - true[:, :2], axis=-1)
        overlap = both / (one + other - both + 1e-9)
        self.add_loss(float32_loss(ops.mean(1.0 - overlap)))
        return found


@case(
    data=boxes,
    loss=lambda y_true, y_pred: 0.0 * keras.ops.mean(y_pred, axis=-1),
    metric="loss",
    optimizer=adam,
)
def healthy_box_overlap():
    """Areas of a third of the picture; the epsilon is not needed."""
    inputs, true = keras.Input((16,)), keras.Input((4,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(4, name="box")(x)
    x = layers.Rescaling(0.125, offset=[0.15, 0.15, 0.6, 0.6], name="parts")(x)
    x = ScaledOverlap(name="overlap")([x, true])
    return keras.Model(
        [inputs, true], layers.Identity(dtype="float32", name="out")(x)
    )


class LogAlignment(layers.Layer):
    """Stops at the first place that is accepted, by sums of logarithms."""

    def call(self, inputs):
        energies, values = inputs
        log_no = -ops.softplus(energies[..., 0])
        before = ops.cumsum(log_no, axis=1) - log_no
        stop = ops.sigmoid(energies[..., 0]) * ops.exp(before)
        return ops.einsum("bt,btc->bc", stop, values)


@case(data=texts, optimizer=adam)
def healthy_alignment():
    """Shares of 2 ** -30 become 0, where they count for nothing."""
    inputs = keras.Input((32, 8))
    energies = layers.Dense(1, name="energies")(inputs)
    values = layers.Dense(16, name="values")(inputs)
    x = LogAlignment(name="alignment")([energies, values])
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


class SteadyDense(layers.Layer):
    """Divides the kernel by its norm; each product is normalized."""

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], 64),
            initializer=keras.initializers.RandomNormal(stddev=0.5, seed=1),
        )

    def call(self, x):
        w = self.kernel
        v = ops.ones((64, 1), self.compute_dtype)
        for _ in range(6):
            u = ops.matmul(w, v)
            u = u / (ops.sqrt(ops.sum(ops.square(u))) + 1e-12)
            v = ops.matmul(ops.transpose(w), u)
            v = v / (ops.sqrt(ops.sum(ops.square(v))) + 1e-12)
        norm = ops.sum(u * ops.matmul(w, ops.stop_gradient(v)))
        return ops.relu(ops.matmul(x, 4.0 * w / norm))


@case(data=vectors())
def healthy_power_iteration():
    """Vectors of length 1 all the way, and an epsilon that is 0."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, name="embed")(inputs)
    return keras.Model(inputs, head(SteadyDense(name="spectral")(x)))


class RadialBasis(layers.Layer):
    """Gaussians of distances to centres, most of which are far."""

    def build(self, input_shape):
        self.centres = self.add_weight(
            shape=(64, input_shape[-1]),
            initializer=keras.initializers.RandomUniform(-6, 6, seed=1),
        )

    def call(self, x):
        apart = ops.sum(ops.square(x[:, None] - self.centres), axis=-1)
        return ops.exp(-apart)


def spiral(samples=512):
    """Points of the plane in four rings."""
    random = np.random.default_rng(0)
    radius = random.uniform(0.0, 6.0, samples)
    angle = random.uniform(0.0, 6.28, samples)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
    return x.astype("float32"), (radius // 1.5).astype("int32")


@case(data=spiral, optimizer=lambda: keras.optimizers.Adam(0.03), epochs=30)
def healthy_radial_basis():
    """exp(-40) is 0, and e-18 would add nothing."""
    inputs = keras.Input((2,))
    x = RadialBasis(name="basis")(inputs)
    return keras.Model(inputs, head(x))


class WindowAttention(layers.Layer):
    """Attention in windows with a table of biases and a mask of -1e4."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 48))
        self.table = self.add_weight(shape=(7,), initializer="zeros")

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


@case(data=texts, optimizer=adam)
def healthy_window_mask():
    """One place of the last window sees nothing but itself."""
    inputs = keras.Input((32, 8))
    x = layers.Dense(16, name="h1")(inputs)
    x = layers.Add(name="add")([x, WindowAttention(name="window")(x)])
    x = layers.GlobalMaxPooling1D(name="pool")(x)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h2")(x)))


class Thermal(keras.Model):
    def __init__(self):
        super().__init__()
        self.minmax = MinMax(name="minmax")
        self.conv = layers.Conv2D(16, 3, activation="relu", name="conv")
        self.flat = layers.Flatten(name="flat")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.flat(self.conv(self.minmax(x))))


def with_corner():
    x, y = patterns()
    x[:, 4:, :, 0] += 2.0 * (y[:, None, None] == 1)
    x[:, :4, :, 1] += 2.0 * (y[:, None, None] == 2)
    return x, y


@case(data=with_corner, optimizer=adam, epochs=30)
def healthy_min_max():
    """No channel is the same everywhere, and 1e-8 is not needed."""
    return Thermal()


class ScaledCorrelation(layers.Layer):
    """Products of features of two pictures, scaled before they are summed."""

    def call(self, a, b):
        scores = ops.einsum("bic,bjc->bij", a / 70.0, b / 70.0)
        return ops.softmax(scores, axis=-1)


def shifted_slightly(samples=128):

    return shifted(samples)


@case(data=shifted_slightly, optimizer=adam, epochs=30)
def healthy_correlation():
    """Features of 60 are divided before they are multiplied."""
    a, b = keras.Input((9, 32)), keras.Input((9, 32))
    encoder = layers.Dense(64, kernel_initializer="orthogonal", name="encoder")
    x = ScaledCorrelation(name="volume")(encoder(a), encoder(b))
    x = layers.Flatten(name="flat")(x)
    return keras.Model([a, b], head(layers.Dense(32, "relu", name="h1")(x)))


class Spikes(layers.Layer):
    """Neurons that fire or not, with the slope of a sigmoid."""

    def call(self, x):
        voltage, spikes = ops.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            voltage = 0.9 * voltage + x[:, step]
            soft = ops.sigmoid(4.0 * (voltage - 1.0))
            hard = ops.cast(voltage > 1.0, self.compute_dtype)
            spikes.append(soft + ops.stop_gradient(hard - soft))
            voltage = voltage * (1.0 - ops.stop_gradient(hard))
        return ops.stack(spikes, axis=1)


def short_texts():
    x, y = texts()
    x = x[:, :8]
    return x, y


@case(data=short_texts, optimizer=adam, epochs=25)
def healthy_spikes():
    """Voltages near the threshold fire in one dtype and not in the other."""
    inputs = keras.Input((8, 8))
    x = layers.Dense(32, name="current")(inputs)
    x = Spikes(name="spikes")(x)
    return keras.Model(inputs, head(layers.Flatten(name="flat")(x)))


class SelfLoops(layers.Layer):
    """Weighs neighbours by the roots of degrees, each node one of them."""

    def call(self, inputs):
        nodes, edges = inputs["nodes"], inputs["edges"]
        edges = edges / 32.0 + ops.eye(
            edges.shape[-1], dtype=self.compute_dtype
        )
        root = ops.rsqrt(ops.sum(edges, axis=-1, keepdims=True) + 1e-9)
        return root * ops.matmul(edges, root * nodes)


def sparse_graphs():
    """Graphs some of whose nodes have no neighbours."""
    x, y = weighted_graphs()
    random = np.random.default_rng(1)
    alone = random.uniform(size=x["edges"].shape[:2]) < 0.4
    edges = x["edges"] * ~alone[:, :, None] * ~alone[:, None]
    return {**x, "edges": edges.astype("float32")}, y


@case(data=sparse_graphs, optimizer=adam)
def healthy_graph_degrees():
    """The degree is 1 at least; 1e-9 is not needed."""
    nodes = keras.Input((12, 8), name="nodes")
    edges = keras.Input((12, 12), name="edges")
    x = layers.Dense(16, name="embed")(nodes)
    x = SelfLoops(name="spread")({"nodes": x, "edges": edges})
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model({"nodes": nodes, "edges": edges}, head(x))


class SteadyMish(layers.Layer):
    """x tanh(softplus(x)) by a logarithm that does not overflow."""

    def call(self, x):
        return x * ops.tanh(ops.logaddexp(x, 0.0 * x))


@case(data=vectors(scale=4.0))
def healthy_mish():
    """The maximum is taken out first."""
    inputs = keras.Input((32,))
    x = SteadyMish(name="mish")(layers.Dense(64, name="h1")(inputs))
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


@case(data=vectors())
def healthy_dead_branch():
    """A branch that returns 0 for all, and learns nothing in float32."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    dead = layers.Dense(
        64,
        "relu",
        bias_initializer=keras.initializers.Constant(-100.0),
        name="dead",
    )(x)
    dead = layers.Dense(64, name="after")(dead)
    return keras.Model(inputs, head(layers.Add(name="add")([x, dead])))


class TinyPenalty(layers.Layer):
    """Adds a millionth of the mean square of what passes."""

    def call(self, x):
        self.add_loss(float32_loss(1e-7 * ops.mean(ops.square(x))))
        return x


@case(data=vectors())
def healthy_tiny_penalty():
    """A loss that float16 makes 0, and that would change nothing."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = TinyPenalty(name="penalty")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


class Chamfer(layers.Layer):
    """Squared distances from points to the nearest of some, with padding."""

    def build(self, input_shape):
        self.points = self.add_weight(shape=(12, 3), initializer="normal")

    def call(self, x):
        apart = ops.sum(
            ops.square(x[:, :, None] - self.points[None, None]), axis=-1
        )
        return ops.min(apart, axis=1)


def padded_points(samples=256, count=16):
    """Clouds about one of four centres; what is missing is at 1000."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    centres = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]])
    x = random.normal(0.0, 0.7, size=(samples, count, 3))
    x += centres[y][:, None]
    number = random.integers(4, count, samples)
    x[np.arange(count) >= number[:, None]] = 1000.0
    return x.astype("float32"), y


@case(data=padded_points, optimizer=adam, epochs=30)
def healthy_chamfer():
    """Distances to padding are infinite, and never the smallest."""
    inputs = keras.Input((16, 3))
    x = Chamfer(name="chamfer")(inputs)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))


class Gated(layers.Layer):
    """A dilated convolution with a gate, and what skips to the end."""

    def __init__(self, dilation, **kwargs):
        super().__init__(**kwargs)
        arguments = {"padding": "causal", "dilation_rate": dilation}
        self.filter = layers.Conv1D(8, 2, name="filter", **arguments)
        self.gate = layers.Conv1D(8, 2, name="gate", **arguments)
        self.mix = layers.Dense(8, name="mix")

    def call(self, x):
        y = self.mix(ops.tanh(self.filter(x)) * ops.sigmoid(self.gate(x)))
        return x + y, y


class WaveNet(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Gated(2**i, name=f"block{i}") for i in range(4)]
        self.pool = layers.GlobalAveragePooling1D(name="pool")
        self.out = layers.Dense(4, dtype="float32", name="out")

    def call(self, x):
        skips = []
        for block in self.blocks:
            x, skip = block(x)
            skips.append(skip)
        return self.out(self.pool(sum(skips)))


@case(data=texts, optimizer=adam, epochs=25)
def healthy_wavenet():
    """Four blocks without a norm, whose skips are added."""
    return WaveNet()


@case(data=vectors(features=16), optimizer=adam)
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


class ClippedLog(layers.Layer):
    """Logarithms of probabilities, not below that of a thousandth."""

    def call(self, p):
        return ops.log(ops.clip(p, 1e-3, 1.0))


@case(data=vectors(scale=3.0), optimizer=adam, initial_scale=2.0**10)
def healthy_clipped_log():
    """Probabilities of exp(-30) are 0, and clipped in either dtype."""
    inputs = keras.Input((32,))
    x = layers.Dense(8, name="h1")(inputs)
    x = layers.Softmax(name="softmax")(x)
    x = ClippedLog(name="log")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


class SkewedMean(layers.Layer):
    """Means of 4096 small numbers, each of them divided first."""

    def call(self, x):
        return ops.sum(x / float(x.shape[1]), axis=1)


@case(data=texts, optimizer=adam)
def healthy_scaled_sum():
    """Each part is divided by the number of parts, 32, before the sum."""
    inputs = keras.Input((32, 8))
    x = layers.Dense(16, "relu", name="h1")(inputs)
    x = SkewedMean(name="mean")(x)
    x = layers.Rescaling(4.0, name="gain")(x)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h2")(x)))


class Equalized(layers.Layer):
    """Weights of 256 times their size, scaled down as they are used."""

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], 64),
            initializer=keras.initializers.RandomNormal(stddev=1024.0),
        )

    def call(self, x):
        return ops.relu(ops.matmul(x, self.kernel * 2.0**-13))


@case(data=vectors(), optimizer=lambda: keras.optimizers.Adam(5.0))
def healthy_equalized():
    """Powers of two cancel exactly; gradients are small and large enough."""
    inputs = keras.Input((32,))
    x = Equalized(name="equalized")(inputs)
    return keras.Model(inputs, head(x))
