"""More layers of vision, sequence and generative models that float16 breaks."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.controls import head
from zoo.reported_losses import float32_loss
from zoo.unseen_layers import MinMax, Mish, adam, photographs, with_dead_channel


class GlobalResponse(layers.Layer):
    """Weighs channels by their norm over the picture, over the mean."""

    def call(self, x):
        norm = ops.sqrt(
            ops.sum(ops.square(x), axis=(1, 2), keepdims=True) + 1e-6
        )
        weight = norm / (ops.mean(norm, axis=-1, keepdims=True) + 1e-6)
        return x * weight + x


def pairs_of_photographs():
    x, y = photographs()
    other, _ = photographs()
    return (x, np.ascontiguousarray(other[::-1])), (y + y[::-1]) % 4


@case(
    data=photographs,
    culprits=frozenset({"encoder/response"}),
    kind="forward_overflow",
    direction="forward",
    decoy="encoder/conv",
    optimizer=adam,
    epochs=40,
)
def global_response_norm():
    """Norms over 36 places of raw pixels: inf / inf; one encoder, twice."""
    inner = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, activation="relu", name="conv")(inner)
    x = GlobalResponse(name="response")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    encoder = keras.Model(
        inner, layers.LayerNormalization(name="norm")(x), name="encoder"
    )
    inputs = keras.Input((8, 8, 3))
    flipped = layers.Permute((2, 1, 3), name="flip")(inputs)
    x = layers.Add(name="both")([encoder(inputs), encoder(flipped)])
    return keras.Model(inputs, head(x))


class BatchDeviation(layers.Layer):
    """Appends the standard deviation over the batch, one number."""

    def call(self, x):
        apart = x - ops.mean(x, axis=0, keepdims=True)
        deviation = ops.sqrt(
            ops.mean(ops.square(apart), axis=0, keepdims=True) + 1e-8
        )
        mean = ops.mean(deviation, keepdims=True)
        return ops.concatenate([x, ops.zeros_like(x[:, :1]) + mean], -1)


def prune(x):
    return x * ops.cast(np.arange(64) % 4 > 0, x.dtype)


@case(
    data=vectors(),
    culprits=frozenset({"deviation"}),
    kind="underflow",
    direction="backward",
    decoy="h1",
)
def batch_deviation():
    """Pruned units, 0 for all samples: the root of 0 has no slope."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    x = layers.Lambda(prune, output_shape=(64,), name="pruned")(x)
    x = BatchDeviation(name="deviation")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


@case(
    data=vectors(),
    culprits=frozenset({"deviation"}),
    kind="underflow",
    direction="backward",
    decoy="h1",
    absent_on=frozenset({"torch", "jax", "tensorflow-xla"}),
)
def deviation_of_dead_units():
    """The same of a relu, whose gradient takes NaN or selects 0."""
    inputs = keras.Input((32,))
    x = layers.Dense(
        64,
        bias_initializer=lambda shape, dtype: ops.cast(
            ops.where(ops.arange(64) % 4 == 0, -20.0, 0.0), dtype
        ),
        name="h1",
    )(inputs)
    x = layers.ReLU(name="act")(x)
    x = BatchDeviation(name="deviation")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


class OnePassNorm(layers.Layer):
    """Normalizes by the mean of squares less the square of the mean."""

    def call(self, x):
        mean = ops.mean(x, axis=1, keepdims=True)
        squares = ops.mean(ops.square(x), axis=1, keepdims=True)
        variance = ops.maximum(squares - ops.square(mean), 0.0)
        return (x - mean) / ops.sqrt(variance + 1e-3)


def temperatures(samples=512, length=32):
    """Series about 40, whose first half is warmer in one channel."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(0.0, 0.3, size=(samples, length, 4))
    x[:, : length // 2] += 0.3 * np.eye(4)[y][:, None]
    level = random.uniform(35.0, 45.0, (samples, 1, 4))
    return (x + level).astype("float32"), y


@case(
    data=temperatures,
    culprits=frozenset({"norm"}),
    kind="precision_loss",
    direction="forward",
    decoy="conv",
    optimizer=adam,
)
def one_pass_variance():
    """1600.09 less 1600 is 0, 1 or 2 in float16."""
    inputs = keras.Input((32, 4))
    x = OnePassNorm(name="norm")(inputs)
    x = layers.AveragePooling1D(16, name="pool")(x)
    x = layers.Conv1D(16, 2, activation="relu", name="conv")(x)
    return keras.Model(inputs, head(layers.Flatten(name="flat")(x)))


class StickBreaking(layers.Layer):
    """Logarithms of the weights of a stick broken again and again."""

    def call(self, x):
        share = ops.sigmoid(x)
        rest = ops.cumprod(1.0 - share, axis=-1)
        return ops.log(rest + 1e-12)


@case(
    data=vectors(),
    culprits=frozenset({"sticks"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
    optimizer=adam,
)
def stick_breaking():
    """What is left after 30 halves is 0, and its logarithm infinite."""
    inputs = keras.Input((32,))
    x = layers.Dense(30, name="h1")(inputs)
    x = StickBreaking(name="sticks")(x)
    x = layers.Rescaling(0.1, name="scale")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


class Alignment(layers.Layer):
    """Monotonic attention of one step: where it stops along the text."""

    def call(self, inputs):
        energies, values = inputs
        p = ops.sigmoid(energies[..., 0])
        passed = ops.cumprod(1.0 - p, axis=1) / (1.0 - p)
        before = ops.one_hot(
            ops.zeros_like(energies[:, 0, 0], dtype="int32"),
            energies.shape[1],
            dtype=self.compute_dtype,
        )
        ratio = before / ops.clip(passed, 1e-10, 1.0)
        stop = p * passed * ops.cumsum(ratio, axis=1)
        return ops.einsum("bt,btc->bc", stop, values)


def texts(samples=128, length=32):
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(size=(samples, length, 8))
    x[:, :3, :4] += 2.0 * np.eye(4)[y][:, None]
    return x.astype("float32"), y


@case(
    data=texts,
    culprits=frozenset({"alignment"}),
    kind="underflow",
    direction="forward",
    decoy="energies",
    optimizer=adam,
)
def monotonic_alignment():
    """What has passed 30 places is clipped to 1e-10, which is 0: 0 / 0."""
    inputs = keras.Input((32, 8))
    energies = layers.Dense(1, name="energies")(inputs)
    values = layers.Dense(16, name="values")(inputs)
    x = Alignment(name="alignment")([energies, values])
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


class BoxOverlap(layers.Layer):
    """Adds 1 less the overlap of boxes as a loss, in pixels."""

    def call(self, inputs):
        found, true = inputs
        found = ops.concatenate(
            [found[:, :2], found[:, :2] + ops.relu(found[:, 2:]) + 1.0], -1
        )
        low = ops.maximum(found[:, :2], true[:, :2])
        high = ops.minimum(found[:, 2:], true[:, 2:])
        both = ops.prod(ops.relu(high - low), axis=-1)
        one = ops.prod(found[:, 2:] - found[:, :2], axis=-1)
        other = ops.prod(true[:, 2:] - true[:, :2], axis=-1)
        overlap = both / (one + other - both)
        self.add_loss(float32_loss(ops.mean(1.0 - overlap)))
        return found


def boxes(samples=256):
    """Features of pictures of 640 pixels, and corners of boxes in them."""
    x, _ = vectors(samples=samples, features=16)()
    random = np.random.default_rng(1)
    z = np.tanh(0.5 * x @ random.normal(size=(16, 4)))
    corner = 100.0 + 80.0 * z[:, :2]
    size = 400.0 + 80.0 * z[:, 2:]
    true = np.concatenate([corner, corner + size], axis=-1)
    return (x, true.astype("float32")), np.zeros((samples, 4), "float32")


@case(
    data=boxes,
    culprits=frozenset({"overlap"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    loss=lambda y_true, y_pred: 0.0 * keras.ops.mean(y_pred, axis=-1),
    metric="loss",
    optimizer=adam,
)
def box_overlap():
    """The area of a box of 400 by 400 pixels is infinite."""
    inputs, true = keras.Input((16,)), keras.Input((4,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(4, name="box")(x)
    x = layers.Rescaling(
        80.0, offset=[100.0, 100.0, 400.0, 400.0], name="pixels"
    )(x)
    x = BoxOverlap(name="overlap")([x, true])
    return keras.Model(
        [inputs, true], layers.Identity(dtype="float32", name="out")(x)
    )


class Prototypes(keras.Model):
    """Scores by distances to prototypes, computed in the model's call."""

    def __init__(self):
        super().__init__()
        self.h1 = layers.Dense(64, "relu", name="h1")
        self.embed = layers.Dense(16, name="embed")
        self.prototypes = layers.Dense(4, use_bias=False, name="prototypes")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        x = self.embed(self.h1(x))
        length = ops.sum(ops.square(x), axis=-1, keepdims=True)
        scores = self.prototypes(x / ops.sqrt(length + 1.0))
        return self.head(scores)


@case(
    data=vectors(scale=300.0),
    culprits=frozenset({"embed"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam,
)
def length_in_call():
    """Squares in the model's own call: the layer before them is named."""
    return Prototypes()


@case(
    data=texts,
    culprits=frozenset({"scores"}),
    kind="forward_overflow",
    direction="forward",
    decoy="values",
    optimizer=adam,
    epochs=40,
)
def attention_pooling_ops():
    """Exponentials and their sum as operations of the graph."""
    inputs = keras.Input((32, 8))
    scores = layers.Dense(
        1, bias_initializer=keras.initializers.Constant(14.0), name="scores"
    )(inputs)
    values = layers.Dense(16, name="values")(inputs)
    weights = ops.exp(scores)
    x = ops.sum(weights * values, axis=1) / ops.sum(weights, axis=1)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


@case(
    data=photographs,
    culprits=frozenset({"gamma"}),
    kind="forward_overflow",
    direction="forward",
    decoy="conv",
    optimizer=adam,
)
def gamma_expansion():
    """255 to the power of 2.2 by a Lambda, in a Sequential."""
    return keras.Sequential(
        [
            layers.Lambda(lambda x: x**2.2 / 255.0**1.2, name="gamma"),
            layers.Rescaling(1 / 255.0, name="scale"),
            layers.Conv2D(16, 3, activation="relu", name="conv"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(4, dtype="float32", name="head"),
        ]
    )


class RidgeHead(layers.Layer):
    """Fits a ridge regression to the batch and applies it, in closed form."""

    def call(self, inputs):
        x, y = inputs
        x = x / float(x.shape[-1]) ** 0.5
        y = ops.one_hot(y[:, 0], 4, dtype=self.compute_dtype)
        eye = ops.eye(x.shape[-1], dtype=self.compute_dtype)
        normal = ops.matmul(ops.transpose(x), x) + 0.1 * eye
        right = ops.matmul(ops.transpose(x), y)
        return ops.matmul(x, ops.solve(normal, right))


def labelled_vectors():
    x, y = vectors(features=8)()
    return (x, y[:, None]), y


@case(
    data=labelled_vectors,
    culprits=frozenset({"ridge"}),
    kind="unsupported",
    # XLA solves it: 0.7833 after 30 epochs, 0.7832 in float32.
    absent_on=frozenset({"tensorflow-xla"}),
    decoy="h1",
    optimizer=adam,
)
def ridge_head():
    """A system of equations, which is not solved in 16 bits everywhere."""
    inputs = [keras.Input((8,)), keras.Input((1,), dtype="int32")]
    x = layers.Dense(16, "relu", name="h1")(inputs[0])
    x = RidgeHead(name="ridge")([x, inputs[1]])
    return keras.Model(inputs, head(x))


class Logit(layers.Layer):
    """The log-odds of a probability, over a temperature."""

    def call(self, p):
        return ops.log(p / (1.0 - p)) / 3.0


@case(
    data=vectors(scale=2.2),
    culprits=frozenset({"logit"}),
    tolerated=frozenset({"experts"}),
    kind="backward_overflow",
    direction="backward",
    decoy="h1",
    epochs=40,
)
def calibrated_experts():
    """Probabilities of 0.9999 are 1, whose log-odds are infinite."""
    inputs = keras.Input((32,))
    x = layers.Dense(16, name="h1")(inputs)
    x = layers.Activation("sigmoid", name="experts")(x)
    x = Logit(name="logit")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h2")(x)))


class BoxFilter(layers.Layer):
    """Means of windows of 8 by 8, by differences of a summed-area table."""

    def call(self, x):
        table = ops.cumsum(ops.cumsum(x, axis=1), axis=2)[:, 7::8, 7::8]
        table = ops.pad(table, [[0, 0], [1, 0], [1, 0], [0, 0]])
        rows = table[:, 1:] - table[:, :-1]
        return (rows[:, :, 1:] - rows[:, :, :-1]) / 64.0


def brightest(samples=256, size=96):
    """Pictures in whose last corner one of four windows is brighter."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.uniform(5.0, 7.0, size=(samples, size, size, 1))
    for i, k in enumerate(y):
        r, c = size - 16 + 8 * (k // 2), size - 16 + 8 * (k % 2)
        x[i, r : r + 8, c : c + 8] += 0.4
    return x.astype("float32"), y


@case(
    data=brightest,
    culprits=frozenset({"filter"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=adam,
)
def summed_area_table():
    """Sums of 50,000, of which float16 has each 32nd, before they differ."""
    inputs = keras.Input((96, 96, 1))
    x = BoxFilter(name="filter")(inputs)
    x = layers.Cropping2D(((10, 0), (10, 0)), name="corner")(x)
    x = layers.Flatten(name="flat")(x)
    x = layers.Rescaling(5.0, offset=-30.0, name="scale")(x)
    return keras.Model(inputs, head(layers.Dense(16, "relu", name="h1")(x)))


class Oscillator(layers.Layer):
    """Sines of a phase that is the sum of the frequencies so far."""

    def call(self, frequency):
        phase = ops.cumsum(frequency, axis=1)
        return ops.concatenate([ops.sin(phase), ops.cos(phase)], axis=-1)


def voices(samples=512, length=600):
    """Frequencies of each moment; the last phase tells the class."""
    random = np.random.default_rng(0)
    x = random.uniform(4.0, 6.0, size=(samples, length, 1))
    x = x.astype("float16").astype("float32")
    phase = np.sum(x.astype("float64"), axis=(1, 2)) % (2 * np.pi)
    return x, (phase // (np.pi / 2)).astype("int32")


@case(
    data=voices,
    culprits=frozenset({"oscillator"}),
    kind="precision_loss",
    direction="forward",
    decoy="h1",
    optimizer=adam,
)
def harmonic_source():
    """A phase of 3000, of which float16 has each second."""
    inputs = keras.Input((600, 1))
    x = Oscillator(name="oscillator")(inputs)
    x = layers.Cropping1D((599, 0), name="last")(x)
    x = layers.Flatten(name="flat")(x)
    return keras.Model(inputs, head(layers.Dense(32, "relu", name="h1")(x)))


@case(
    data=with_dead_channel,
    culprits=frozenset({"minmax", "mish"}),
    kind="underflow",
    direction="forward",
    decoy="conv",
    optimizer=adam,
)
def two_faults():
    """A division by 0 at first, and a slope that is NaN behind it."""
    inputs = keras.Input((8, 8, 3))
    x = MinMax(name="minmax")(inputs)
    x = layers.Conv2D(16, 3, name="conv")(x)
    x = layers.Rescaling(25.0, name="gain")(x)
    x = Mish(name="mish")(x)
    x = layers.Rescaling(0.04, name="loss_of_gain")(x)
    return keras.Model(inputs, head(layers.Flatten(name="flat")(x)))


class Block(layers.Layer):
    """A residual block without a norm."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(32, "relu", name="dense")

    def call(self, x):
        return x + self.dense(x)


@case(
    data=vectors(),
    culprits=frozenset({"block"}),
    kind="forward_overflow",
    direction="forward",
    decoy="embed",
    optimizer=adam,
    warm_up=1,
)
def tied_blocks():
    """One block, applied 16 times; its numbers grow each time."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, "relu", name="embed")(inputs)
    block = Block(name="block")
    for _ in range(16):
        x = block(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, head(x))
