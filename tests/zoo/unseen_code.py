"""Everyday code around layers that float16 breaks."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.own_step import FunctionalOwnStep


def adam(rate):
    return lambda: keras.optimizers.Adam(rate)


def padded_tokens(samples=300, length=12):
    """Sentences of 0 to 12 words; one word in four tells the class."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.integers(5, 40, (samples, length))
    keys = random.random((samples, length)) < 0.4
    x = np.where(keys, y[:, None] + 1, x)
    lengths = random.integers(4, length + 1, samples)
    lengths[::15] = 0
    x = np.where(np.arange(length) < lengths[:, None], x, 0)
    return x.astype("int32"), np.where(lengths > 0, y, 0).astype("int32")


class MeanOfWords(layers.Layer):
    """The mean over the words that are there."""

    supports_masking = True

    def call(self, x, mask=None):
        mask = ops.cast(mask, x.dtype)[..., None]
        return ops.sum(x * mask, 1) / (ops.sum(mask, 1) + 1e-8)

    def compute_mask(self, inputs, mask=None):
        return None


@case(
    data=padded_tokens,
    culprits=frozenset({"pool"}),
    kind="underflow",
    direction="forward",
    decoy="head",
    optimizer=adam(0.02),
)
def mean_of_no_words():
    """A sentence without words: 0 / (0 + 1e-8), and 1e-8 is 0."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(40, 16, mask_zero=True, name="words")(inputs)
    x = MeanOfWords(name="pool")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def long_recordings(samples=64, length=66000):
    """Long recordings, whose level in two channels tells the class."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    level = np.stack([y % 2, y // 2], -1) * 0.8 - 0.4
    x = level[:, None] + random.normal(0, 0.1, (samples, length, 2))
    return x.astype("float32"), y


@case(
    data=long_recordings,
    culprits=frozenset({"pool"}),
    kind="forward_overflow",
    direction="forward",
    decoy="head",
    optimizer=adam(0.1),
    epochs=8,
)
def masked_pool_of_long_series():
    """Keras' pooling with a mask counts 66,000 steps in float16."""
    inputs = keras.Input((66000, 2))
    x = layers.Masking(name="mask")(inputs)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def survival(scale):
    def data(samples=2048, features=16):
        """Patients, sorted from the longest survival to the shortest."""
        random = np.random.default_rng(0)
        x = random.normal(size=(samples, features)).astype("float32")
        risk = x @ random.normal(size=features) / 2
        time = random.exponential(size=samples) * np.exp(-risk)
        order = np.argsort(-time)
        event = (random.random(samples) < 0.7).astype("float32")
        return x[order] * np.float32(scale), event[order, None]

    return data


class Cox(keras.Model):
    """The partial likelihood: each death against all who lived then."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        at_risk = ops.cumsum(ops.exp(y_pred), axis=0)
        likelihood = ops.cast(y_pred - ops.log(at_risk), "float32")
        return -ops.sum(y * likelihood) / ops.sum(y)


@case(
    data=survival(12.0),
    culprits=frozenset({"risk"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
    loss=None,
    metric="loss",
    epochs=60,
    batch_size=2048,
    samples=2048,
)
def cox_regression():
    """The risks of 2,048 patients are summed before the logarithm."""
    inputs = keras.Input((16,))
    x = layers.Dense(16, "relu", name="h1")(inputs)
    return Cox(inputs, layers.Dense(1, name="risk")(x))


class PairwiseHinge(layers.Layer):
    """Adds a loss over all pairs whose order is known."""

    def call(self, inputs):
        scores, relevance = inputs
        apart = scores - ops.transpose(scores)
        pairs = relevance > ops.transpose(relevance)
        pairs = ops.cast(pairs, scores.dtype)
        hinge = ops.relu(1.0 - apart) * pairs
        self.add_loss(ops.sum(hinge) / (ops.sum(pairs) + 1.0))
        return scores


def ranked(samples=1024):
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, 16)).astype("float32")
    y = x @ random.normal(size=(16, 1))
    return (x, y.astype("float32")), np.zeros((samples, 1), "float32")


@case(
    data=ranked,
    culprits=frozenset({"ranking"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
    loss=None,
    metric="loss",
    epochs=25,
    batch_size=512,
    samples=512,
)
def pairs_of_a_batch():
    """A ranking loss: 130,000 pairs are added up and counted."""
    inputs, relevance = keras.Input((16,)), keras.Input((1,))
    x = layers.Dense(16, "relu", name="h1")(inputs)
    x = layers.Dense(1, name="score")(x)
    x = PairwiseHinge(name="ranking")([x, relevance])
    return keras.Model([inputs, relevance], x)


def beam(samples=128):
    """Places on a beam, and the load there."""
    x = np.linspace(0, 1, samples, dtype="float32")[:, None]
    np.random.default_rng(0).shuffle(x)
    return x, (np.pi**2 * np.sin(np.pi * x)).astype("float32")


class Beam(FunctionalOwnStep):
    """The second derivative, from differences, is to match the load."""

    def loss_of(self, x, y):
        step = 0.02
        curve = self(x + step) - 2.0 * self(x) + self(x - step)
        load = ops.cast(y, curve.dtype)
        inside = ops.mean(ops.square(curve / step**2 + load))
        ends = self(ops.convert_to_tensor([[0.0], [1.0]]))
        loss = inside + 10.0 * ops.mean(ops.square(ends))
        loss = ops.cast(loss, "float32")
        return loss, {"batch_loss": loss}


@case(
    data=beam,
    culprits=frozenset({"h1", "h2", "u"}),
    kind="backward_overflow",
    direction="backward",
    decoy="h1",
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    epochs=60,
    batch_size=128,
    samples=128,
)
def second_differences():
    """A physics-informed network: differences of 1e-4 of numbers near 1."""
    inputs = keras.Input((1,))
    x = layers.Dense(16, "tanh", name="h1")(inputs)
    x = layers.Dense(16, "tanh", name="h2")(x)
    return Beam(inputs, layers.Dense(1, name="u")(x))


def episodes(samples=512):
    """States, the better action in each, and the return that followed."""
    x, y = vectors(features=16)()
    random = np.random.default_rng(1)
    value = 900.0 + 40.0 * x @ random.normal(size=16)
    return x, {"action": y, "outcome": value.astype("float32")}


class ActorCritic(FunctionalOwnStep):
    """Policy gradient with a learned baseline."""

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        value = outputs["value"][:, 0]
        advantage = ops.cast(y["outcome"], value.dtype) - value
        critic = ops.mean(ops.sqrt(1.0 + ops.square(advantage)) - 1.0)
        log_policy = ops.log_softmax(outputs["logits"])
        chosen = ops.one_hot(y["action"], 4, dtype=log_policy.dtype)
        actor = -ops.mean(ops.sum(chosen * log_policy, axis=-1))
        loss = ops.cast(actor, "float32") + ops.cast(critic, "float32")
        return loss, {"batch_loss": loss}


@case(
    data=episodes,
    culprits=frozenset({"critic"}),
    kind="forward_overflow",
    direction="forward",
    decoy="actor",
    optimizer=adam(0.05),
    loss=None,
    metric="batch_loss",
    epochs=20,
)
def returns_of_hundreds():
    """A smooth absolute value has a square of 900 inside, in a step."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="trunk")(inputs)
    logits = layers.Dense(4, name="actor")(x)
    value = layers.Dense(1, name="critic")(x)
    return ActorCritic(inputs, {"logits": logits, "value": value})


class ShotNoise(layers.Layer):
    """The noise of a sensor that counts photons."""

    def __init__(self, full_well, **kwargs):
        super().__init__(**kwargs)
        self.full_well = full_well
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        photons = x * self.full_well
        noise = keras.random.normal(
            ops.shape(x), dtype=x.dtype, seed=self.seeds
        )
        return (photons + ops.sqrt(photons) * noise) / self.full_well


def lights():
    x, y = vectors()()
    return (1 / (1 + np.exp(-x))).astype("float32"), y


@case(
    data=lights,
    culprits=frozenset({"sensor"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
)
def photons():
    """Random noise in photons, of which 200,000 fit into a pixel."""
    inputs = keras.Input((32,))
    x = ShotNoise(200000.0, name="sensor")(inputs)
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def bright_pictures(samples=256):
    """Pictures of a gradient, bytes about 230."""
    random = np.random.default_rng(0)
    slope = random.normal(size=(samples, 2, 1, 1))
    place = np.linspace(-1, 1, 12)
    x = slope[:, 0] * place + slope[:, 1] * place[:, None]
    x = np.clip(235 + 20 * x, 0, 255).astype("float32")
    return x[..., None] / 255, x[..., None]


class Similarity(keras.Model):
    """One minus the structural similarity, of bytes."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        y = ops.cast(y, y_pred.dtype)
        axes = (1, 2, 3)
        a = ops.mean(y, axes, keepdims=True)
        b = ops.mean(y_pred, axes, keepdims=True)
        spread = ops.mean((y - a) ** 2 + (y_pred - b) ** 2, axes)
        both = ops.mean((y - a) * (y_pred - b), axes)
        a, b = ops.squeeze(a, axes), ops.squeeze(b, axes)
        c, d = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        similar = (2 * a * b + c) / (a**2 + b**2 + c)
        similar = similar * (2 * both + d) / (spread + d)
        return 1.0 - ops.mean(ops.cast(similar, "float32"))


@case(
    data=bright_pictures,
    culprits=frozenset({"bytes"}),
    kind="forward_overflow",
    direction="forward",
    decoy="code",
    optimizer=adam(0.005),
    loss=None,
    metric="loss",
)
def similarity_of_bytes():
    """Structural similarity of an autoencoder: 2 * 230 * 230."""
    inputs = keras.Input((12, 12, 1))
    x = layers.Flatten(name="flat")(inputs)
    x = layers.Dense(8, name="code")(x)
    x = layers.Dense(144, "sigmoid", name="pixels")(x)
    x = layers.Reshape((12, 12, 1), name="picture")(x)
    return Similarity(inputs, layers.Rescaling(255.0, name="bytes")(x))


def machines(samples=512):
    """Machines, and the days until they failed."""
    x, _ = vectors(samples, features=16)()
    random = np.random.default_rng(1)
    days = np.exp(6.0 + 0.3 * x @ random.normal(size=(16, 1)) / 2)
    days *= random.weibull(3.0, size=days.shape)
    return x, np.maximum(days, 1.0).astype("float32")


class Weibull(keras.Model):
    """The negative log-likelihood of a Weibull distribution."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        y = ops.cast(y, y_pred.dtype)
        scale, shape = ops.split(y_pred, 2, axis=-1)
        hazard = (y / scale) ** shape
        log_density = (
            ops.log(shape / scale) + (shape - 1.0) * ops.log(y / scale) - hazard
        )
        return -ops.mean(ops.cast(log_density, "float32"))


def weibull(scale):
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(
        2,
        "softplus",
        bias_initializer=lambda shape, dtype=None: ops.convert_to_tensor(
            [scale, 2.0], dtype
        ),
        name="parameters",
    )(x)
    return Weibull(inputs, x)


@case(
    data=machines,
    culprits=frozenset({"parameters"}),
    # On JAX' first weights the loss of one batch is 1.9e9: its gradients fit
    # no loss scale of 1 or more, and other batches lead out of there.
    tolerated=frozenset({"h1"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.1),
    loss=None,
    metric="loss",
    epochs=30,
)
def days_to_failure():
    """A Weibull likelihood: 400 days to the power of 2."""
    return weibull(1.0)


@keras.saving.register_keras_serializable("zoo")
class NormCell(layers.Layer):
    """A recurrent cell that normalizes what it adds up."""

    def __init__(self, units, epsilon=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.state_size = self.output_size = self.units = units
        self.epsilon = epsilon

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.recurrent = self.add_weight(shape=(self.units, self.units))

    def call(self, x, states):
        z = ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent)
        z = z - ops.mean(z, axis=-1, keepdims=True)
        variance = ops.mean(z * z, axis=-1, keepdims=True)
        z = ops.tanh(z / ops.sqrt(variance + self.epsilon))
        return z, [z]

    def get_config(self):
        own = {"units": self.units, "epsilon": self.epsilon}
        return {**super().get_config(), **own}


def padded_series(samples=256, length=9):
    """Series with up to two empty steps in front."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.normal(size=(samples, length, 8))
    x[..., :4] += 2.0 * np.eye(4)[y][:, None]
    start = random.integers(0, 3, samples)
    x *= (np.arange(length) >= start[:, None])[..., None]
    return x.astype("float32"), y


@case(
    data=padded_series,
    culprits=frozenset({"both/forward_rnn"}),
    kind="underflow",
    direction="forward",
    decoy="both/backward_rnn",
    optimizer=adam(0.01),
    epochs=8,
)
def norm_cell_in_front():
    """A cell of one's own, in both directions: only forwards it is 0 / 0."""
    inputs = keras.Input((9, 8))
    rnn = layers.RNN(NormCell(16, name="norm_cell"), name="rnn")
    x = layers.Bidirectional(rnn, name="both")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class Loudness(layers.Layer):
    """The logarithm of the power of a frame."""

    def call(self, x):
        power = ops.sum(x * x, axis=-1, keepdims=True)
        return ops.log(power + 1.0)


def frames(samples=256):
    """Eight frames of raw 16-bit sound; the loudest tells the class."""
    random = np.random.default_rng(0)
    y = random.integers(0, 8, samples).astype("int32")
    x = random.normal(0, 60.0, size=(samples, 8, 20))
    x[np.arange(samples), y] *= 20.0
    return x.astype("float32"), y


@case(
    data=frames,
    culprits=frozenset({"frames/frame/inner/loudness"}),
    kind="forward_overflow",
    direction="forward",
    decoy="head",
    optimizer=adam(0.02),
)
def loudness_of_frames():
    """Raw sound, in a Sequential in a Sequential in TimeDistributed."""
    inner = keras.Sequential(
        [keras.Input((20,)), Loudness(name="loudness")], name="inner"
    )
    frame = keras.Sequential(
        [keras.Input((20,)), inner, layers.Dense(4, name="scale")],
        name="frame",
    )
    inputs = keras.Input((8, 20))
    x = layers.TimeDistributed(frame, name="frames")(inputs)
    x = layers.Flatten(name="flat")(x)
    return keras.Model(inputs, layers.Dense(8, name="head")(x))


class Standardize(layers.Layer):
    """Each row with mean 0 and variance 1, from its moments."""

    def call(self, x):
        mean = ops.mean(x, axis=-1, keepdims=True)
        square = ops.mean(x * x, axis=-1, keepdims=True)
        return (x - mean) / ops.sqrt(square - mean * mean + 1e-3)


def two_sensors():
    a, y = vectors(features=16)()
    b = np.random.default_rng(1).normal(size=a.shape)
    return (a, (a * 0.5 + b).astype("float32") * np.float32(500)), y


@case(
    data=two_sensors,
    culprits=frozenset({"standard"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
)
def shared_standardization():
    """One layer for two sensors; only the second is too large for it."""
    a, b = keras.Input((16,)), keras.Input((16,))
    standard = Standardize(name="standard")
    x = layers.Concatenate(name="both")([standard(a), standard(b)])
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model([a, b], layers.Dense(4, name="head")(x))


class PowerMean(keras.Model):
    """Pools with the mean of third powers, in its own call."""

    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(16, 3, activation="relu", name="conv")
        self.scale = layers.Rescaling(0.1, name="scale")
        self.out = layers.Dense(4, name="head")

    def call(self, x):
        x = self.conv(x)
        x = (ops.mean(x**3, axis=(1, 2)) + 1e-3) ** (1 / 3)
        return self.out(self.scale(x))


def spots_of_bytes(samples=256):
    """Bytes, with a bright spot in one of four colours."""
    random = np.random.default_rng(0)
    y = random.integers(0, 4, samples).astype("int32")
    x = random.uniform(0, 60, size=(samples, 10, 10, 4))
    rows, columns = random.integers(1, 9, (2, samples))
    x[np.arange(samples), rows, columns, y] = 250.0
    return x.astype("float32"), y


@case(
    data=spots_of_bytes,
    culprits=frozenset({"conv"}),
    kind="forward_overflow",
    direction="forward",
    decoy="head",
    optimizer=adam(0.003),
    epochs=20,
)
def power_mean_in_call():
    """Third powers in a subclassed model: 100 ** 3."""
    return PowerMean()
