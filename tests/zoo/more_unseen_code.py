"""More everyday code around layers that float16 breaks."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.own_step import FunctionalOwnStep
from zoo.unseen_code import adam


def house_prices():
    x, _ = vectors(features=16)()
    w = np.random.default_rng(1).normal(size=(16, 1))
    return x, np.exp(12.2 + 0.15 * x @ w).astype("float32")


@case(
    data=house_prices,
    culprits=frozenset({"log_price"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    loss="mean_absolute_percentage_error",
    metric="loss",
    optimizer=adam(0.01),
)
def price_from_operation():
    """The last operation of a functional model makes 200,000 of 12.2."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(
        1,
        bias_initializer=keras.initializers.Constant(12.0),
        name="log_price",
    )(x)
    return keras.Model(inputs, ops.expm1(x))


def incomes():
    """Incomes of up to a million; their orders tell the class."""
    random = np.random.default_rng(0)
    x = np.exp(random.uniform(9.0, 14.0, size=(512, 4)))
    return x.astype("float32"), np.argmax(x, axis=-1).astype("int32")


@case(
    data=incomes,
    culprits=frozenset({"log"}),
    kind="cast_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
)
def log_of_income():
    """The logarithm is harmless, the cast before it is not."""
    inputs = keras.Input((4,))
    x = layers.Lambda(ops.log1p, output_shape=(4,), name="log")(inputs)
    x = layers.Rescaling(1.0, offset=-12.0, name="centre")(x)
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def many_rows(scale):
    def data():
        x, _ = vectors(2048, features=16)()
        w = np.random.default_rng(1).normal(size=(16, 1))
        return x, (scale * np.tanh(x @ w)).astype("float32")

    return data


class Length(FunctionalOwnStep):
    """The length of the vector of a whole batch's errors."""

    def loss_of(self, x, y):
        error = self(x, training=True)
        error = error - ops.cast(y, error.dtype)
        total = ops.sum(ops.square(error))
        loss = ops.cast(ops.sqrt(total + 1e-3), "float32")
        return loss, {"batch_loss": loss}


@case(
    data=many_rows(12.0),
    culprits=frozenset({"head"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    epochs=40,
    batch_size=1024,
    samples=1024,
)
def sum_over_a_batch():
    """Squares of 100 from 1,024 rows are summed before the root."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    return Length(inputs, layers.Dense(1, name="head")(x))


def pairs_of_views(samples=2048):
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, 16)) @ random.normal(size=(16, 16))
    noise = random.normal(size=(2, *x.shape))
    a, b = (x + 0.3 * noise).astype("float32") * np.float32(5)
    return (a, b), np.zeros((samples, 1), "float32")


class Covariance(FunctionalOwnStep):
    """Two views shall agree, and their features not repeat each other."""

    def loss_of(self, x, y):
        a, b = self(x[0]), self(x[1])
        loss = ops.mean(ops.square(a - b)) + spread(a) + spread(b)
        loss = ops.cast(loss, "float32")
        return loss, {"batch_loss": loss}


def spread(z):
    z = z - ops.mean(z, axis=0)
    together = ops.matmul(ops.transpose(z), z) / (z.shape[0] - 1)
    variance = ops.diagonal(together)
    apart = together - ops.eye(z.shape[1], dtype=z.dtype) * variance
    enough = ops.mean(ops.relu(1.0 - ops.sqrt(variance + 1e-3)))
    return 25.0 * enough + 1e-3 * ops.mean(ops.square(apart))


@case(
    data=pairs_of_views,
    culprits=frozenset({"project"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    epochs=40,
    batch_size=1024,
    samples=1024,
)
def covariance_of_views():
    """A covariance is summed over 1,024 rows before it is divided."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    return Covariance(inputs, layers.Dense(8, name="project")(x))


@case(
    data=vectors(scale=6.0),
    culprits=frozenset({"rate"}),
    kind="backward_overflow",
    direction="backward",
    decoy="h1",
    optimizer=adam(0.02),
)
def clipped_exponential():
    """An infinite rate is clipped, but its gradient is 0 * infinity."""

    def rate(x):
        return ops.minimum(ops.exp(x), 1e4)

    inputs = keras.Input((32,))
    x = layers.Dense(32, name="h1")(inputs)
    x = layers.Lambda(rate, output_shape=(32,), name="rate")(x)
    x = layers.Lambda(ops.log1p, output_shape=(32,), name="log")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class Ridge(layers.Layer):
    """Linear regression on a few examples, and what it predicts."""

    def call(self, inputs):
        support, known, query = inputs
        turned = ops.transpose(support, (0, 2, 1))
        normal = ops.matmul(turned, support)
        normal = normal + 0.1 * ops.eye(support.shape[-1], dtype=normal.dtype)
        weights = ops.solve(normal, ops.matmul(turned, known))
        return ops.matmul(query, weights)


def few_shots(samples=256):
    random = np.random.default_rng(0)
    w = random.normal(size=(samples, 4, 1))
    mix = random.normal(size=(4, 8))
    a, b = random.normal(size=(2, samples, 10, 4))
    known, y = a @ w, b @ w
    x = [z.astype("float32") for z in (np.tanh(a @ mix), known)]
    x.append(np.tanh(b @ mix).astype("float32"))
    return tuple(x), y.astype("float32")


@case(
    data=few_shots,
    culprits=frozenset({"ridge"}),
    kind="unsupported",
    direction=None,
    # XLA solves it: 0.676 after 30 epochs, 0.669 in float32.
    absent_on=frozenset({"tensorflow-xla"}),
    decoy="features",
    loss="mse",
    metric="loss",
    optimizer=adam(0.01),
)
def regression_on_few_examples():
    """A head that solves equations, which no backend does in float16."""
    support, query = keras.Input((10, 8)), keras.Input((10, 8))
    known = keras.Input((10, 1))
    features = layers.Dense(8, name="features")
    x = Ridge(name="ridge")([features(support), known, features(query)])
    return keras.Model([support, known, query], x)


def rare(samples=2048):
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, 16)).astype("float32")
    score = x @ random.normal(size=16) / 4
    return x, (score > 0.7).astype("float32")[:, None]


class AreaUnderCurve(FunctionalOwnStep):
    """How many pairs of a positive and a negative are in order."""

    def loss_of(self, x, y):
        score = self(x, training=True)
        y = ops.cast(y, score.dtype)
        pairs = y * (1 - ops.transpose(y))
        wrong = ops.sigmoid(ops.transpose(score) - score) * pairs
        wrong = ops.sum(ops.mean(wrong, axis=1))
        pairs = ops.sum(y) * ops.sum(1 - y)
        loss = ops.cast(wrong / pairs, "float32") * y.shape[0]
        exact, y = ops.cast(score, "float32"), ops.cast(y, "float32")
        pairs = y * (1 - ops.transpose(y))
        apart = exact - ops.transpose(exact)
        disordered = ops.sum(ops.cast(apart <= 0, "float32") * pairs)
        return loss, {"batch_disorder": disordered / ops.sum(pairs)}


@case(
    data=rare,
    culprits=frozenset({"score"}),
    kind="forward_overflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
    loss=None,
    metric="batch_disorder",
    epochs=20,
    batch_size=1024,
    samples=1024,
)
def area_under_curve():
    """The number of pairs is infinite, so the loss is 0, without NaN."""
    inputs = keras.Input((16,))
    x = layers.Dense(16, "relu", name="h1")(inputs)
    return AreaUnderCurve(inputs, layers.Dense(1, name="score")(x))


class Sample(layers.Layer):
    """Draws a code whose divergence, summed, shall be a given one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, log_variance = inputs
        variance = ops.exp(log_variance)
        divergence = ops.square(mean) + variance - 1.0 - log_variance
        excess = 1e-4 * ops.sum(divergence) - 0.5
        self.add_loss(ops.cast(ops.square(excess), "float32"))
        noise = keras.random.normal(
            ops.shape(mean), dtype=mean.dtype, seed=self.seeds
        )
        return mean + ops.sqrt(variance) * noise


def rebuilt(scale):
    def data():
        x, _ = vectors(1024, features=16, scale=scale)()
        return x, x

    return data


@case(
    data=rebuilt(6.0),
    culprits=frozenset({"code"}),
    kind="forward_overflow",
    direction="forward",
    decoy="mean",
    loss="mse",
    metric="loss",
    optimizer=adam(0.02),
    epochs=20,
    batch_size=512,
    samples=512,
)
def divergence_of_a_batch():
    """add_loss with a sum over 512 rows, made small only afterwards."""
    inputs = keras.Input((16,))
    mean = layers.Dense(16, name="mean")(inputs)
    log_variance = layers.Dense(
        16, kernel_initializer="zeros", name="log_variance"
    )(inputs)
    x = Sample(name="code")([mean, log_variance])
    return keras.Model(inputs, layers.Dense(16, name="rebuild")(x))


def weighted(largest):
    def data():
        x, y = vectors(features=16)()
        random = np.random.default_rng(1)
        weight = np.exp(random.uniform(0, np.log(largest), len(x)))
        return x, {"label": y, "weight": weight.astype("float32")}

    return data


class InversePropensity(keras.Model):
    """Rows count as much as they were unlikely to be seen."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        weight = ops.cast(y["weight"], self.compute_dtype)
        label = ops.one_hot(y["label"], 4)
        log_p = ops.log_softmax(ops.cast(y_pred, "float32"))
        losses = -ops.sum(label * log_p, axis=-1)
        losses = ops.cast(losses, weight.dtype)
        loss = ops.sum(weight * losses) / ops.sum(weight)
        return ops.cast(loss, "float32")


@case(
    data=weighted(3e5),
    culprits=frozenset({"<model>"}),
    kind="cast_overflow",
    direction="forward",
    decoy="head",
    optimizer=adam(0.02),
    loss=None,
    metric="loss",
)
def inverse_propensity():
    """Weights of up to 300,000 are cast to the model's dtype."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    return InversePropensity(inputs, layers.Dense(4, name="head")(x))


class Popularity(layers.Layer):
    """Corrects scores by how often each item was ever seen."""

    def __init__(self, counts, **kwargs):
        super().__init__(**kwargs)
        self.counts = counts

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(len(self.counts),),
            initializer=lambda s, dtype=None: ops.convert_to_tensor(
                self.counts, dtype
            ),
            trainable=False,
            name="seen",
        )

    def call(self, scores):
        share = self.seen / ops.sum(self.seen)
        return scores - ops.log(share)


@case(
    data=vectors(),
    culprits=frozenset({"popularity"}),
    kind="forward_overflow",
    direction="forward",
    decoy="head",
    optimizer=adam(0.02),
)
def popularity_of_items():
    """Each count fits, their sum does not, and every share becomes 0."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(4, name="head")(x)
    x = Popularity([60000.0, 300.0, 20.0, 9000.0], name="popularity")(x)
    return keras.Model(inputs, x)


class ImportanceBound(layers.Layer):
    """Adds the bound of eight samples: the mean of their densities."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(5)
        self.decode = layers.Dense(16, name="decode")

    def call(self, inputs):
        mean, x = inputs
        noise = keras.random.normal(
            (8, *ops.shape(mean)), dtype=mean.dtype, seed=self.seeds
        )
        z = mean + 0.1 * noise
        error = ops.square(self.decode(z) - x)
        density = ops.exp(-0.5 * ops.sum(error, axis=-1))
        bound = -ops.log(ops.mean(density, axis=0) + 1e-30)
        self.add_loss(ops.mean(bound))
        return mean


@case(
    data=rebuilt(1.3),
    culprits=frozenset({"bound"}),
    kind="underflow",
    direction="forward",
    decoy="mean",
    loss=None,
    metric="loss",
    optimizer=adam(0.01),
    epochs=10,
)
def importance_weighted_bound():
    """Densities of e**-20 are 0 in float16, and so is their mean."""
    inputs = keras.Input((16,))
    x = layers.Dense(16, name="mean")(inputs)
    return keras.Model(inputs, ImportanceBound(name="bound")([x, inputs]))


class Recency(layers.Layer):
    """The mean of events, of which each day costs a tenth of the weight."""

    def call(self, inputs):
        events, age = inputs
        weight = 0.9 ** age[..., None]
        return ops.sum(weight * events, 1) / ops.sum(weight, 1)


def customers(oldest):
    def data(samples=300):
        """Customers; a third of them have not come for long."""
        random = np.random.default_rng(0)
        y = random.integers(0, 4, samples).astype("int32")
        events = random.normal(size=(samples, 6, 4)) + 3 * np.eye(4)[y][:, None]
        age = random.uniform(0, 30, (samples, 6))
        age[::3] += oldest
        return (events.astype("float32"), age.astype("float32")), y

    return data


@case(
    data=customers(190.0),
    culprits=frozenset({"recent"}),
    kind="underflow",
    direction="forward",
    decoy="h1",
    optimizer=adam(0.02),
)
def weights_of_old_events():
    """0.9 ** 190 is 0: for those who have not come it is 0 / 0."""
    events, age = keras.Input((6, 4)), keras.Input((6,))
    x = Recency(name="recent")([events, age])
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model([events, age], layers.Dense(4, name="head")(x))


class Cents(keras.Model):
    """Squared errors of money, with the head in float32."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred - y))


@case(
    data=many_rows(2e6),
    optimizer=adam(0.1),
    loss=None,
    metric="loss",
    culprits=frozenset({"h1"}),
    kind="backward_overflow",
    direction="backward",
    decoy="cents",
    epochs=60,
    batch_size=128,
)
def loss_of_money():
    """A loss of 1e12 needs a loss scale below its floor of 2**-14."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    x = layers.Dense(1, dtype="float32", name="head")(x)
    x = layers.Rescaling(1e6, dtype="float32", name="cents")(x)
    return Cents(inputs, x)
