"""Everyday code around layers that is sound in float16."""

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case, vectors
from zoo.more_unseen_code import (
    InversePropensity,
    Recency,
    customers,
    many_rows,
    rebuilt,
    weighted,
)
from zoo.own_step import FunctionalOwnStep
from zoo.unseen_code import (
    ActorCritic,
    MeanOfWords,
    adam,
    episodes,
    padded_series,
    padded_tokens,
    survival,
)


def labelled(step):
    """Returns a function that makes a model of one hidden layer."""

    def build(outputs=1, **head):
        inputs = keras.Input((16,))
        x = layers.Dense(32, "relu", name="h1")(inputs)
        return step(inputs, layers.Dense(outputs, name="head", **head)(x))

    return build


class Huber(FunctionalOwnStep):
    """A loss whose other branch overflows where it is not chosen."""

    def loss_of(self, x, y):
        error = self(x, training=True)
        error = ops.abs(error - ops.cast(y, error.dtype))
        loss = ops.where(error < 1.0, 0.5 * error * error, error - 0.5)
        loss = ops.mean(ops.cast(loss, "float32"))
        return loss, {"batch_loss": loss}


@case(
    data=many_rows(500.0),
    optimizer=adam(0.1),
    loss=None,
    metric="batch_loss",
    epochs=10,
    batch_size=256,
)
def sound_huber():
    """The square of 500 is infinite, and is not the one that counts."""
    return labelled(Huber)()


class FarSquares(layers.Layer):
    """Squares, but of what is near only."""

    def call(self, x):
        return ops.where(ops.abs(x) < 10.0, x * x, 100.0)


@case(data=vectors(scale=1.0, mean=0.0), optimizer=adam(0.02))
def sound_where():
    """Squares of 1,000 are infinite, and replaced, and have no gradient."""
    inputs = keras.Input((32,))
    wide = layers.Rescaling(300.0, name="wide")(inputs)
    x = layers.Dense(32, "relu", name="h1")(FarSquares(name="near")(wide))
    y = layers.Dense(32, "relu", name="h2")(inputs)
    x = layers.Concatenate(name="both")([0.01 * x, y])
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


@case(data=vectors(scale=20.0), optimizer=adam(0.02))
def sound_clipped_cube():
    """A cube of 60 is infinite, and clipped to what float16 holds."""

    def cube(x):
        return ops.clip(x * x * x, -1000.0, 1000.0)

    inputs = keras.Input((32,))
    x = layers.Lambda(cube, output_shape=(32,), name="cube")(inputs)
    x = layers.Rescaling(1e-3, name="small")(x)
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def full_sentences():
    x, y = padded_tokens()
    return x[x[:, 0] > 0], y[x[:, 0] > 0]


@case(data=full_sentences, optimizer=adam(0.02))
def sound_mean_of_words():
    """The epsilon is 0, and no sentence is empty; the last batch is."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(40, 16, mask_zero=True, name="words")(inputs)
    x = MeanOfWords(name="pool")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class Classify(FunctionalOwnStep):
    """An ordinary train step of one's own."""

    def loss_of(self, x, y):
        logits = self(x, training=True)
        loss = keras.losses.sparse_categorical_crossentropy(
            y, ops.cast(logits, "float32"), from_logits=True
        )
        loss = ops.mean(loss)
        return loss, {"batch_loss": loss}


@case(
    data=vectors(500, features=16),
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    kind="scale_search",
    initial_scale=2.0**24,
    epochs=10,
)
def sound_search():
    """A train step of one's own, whose loss scale starts at 2**24."""
    return labelled(Classify)(4)


class LongSum(FunctionalOwnStep):
    """Adds up the squares of a batch, in float32."""

    def loss_of(self, x, y):
        error = ops.cast(self(x, training=True), "float32") - y
        loss = ops.sum(ops.square(error))
        return loss, {"batch_loss": loss}


@case(
    data=many_rows(12.0),
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    epochs=40,
    batch_size=1024,
    samples=1024,
    kind="scale_search",
)
def sound_sum_over_a_batch():
    """Squares of 100 from 1,024 rows are summed in float32."""
    return labelled(LongSum)()


class Running(layers.Layer):
    """Subtracts a moving average that is kept in float32."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],),
            initializer="zeros",
            trainable=False,
            autocast=False,
            name="mean",
        )

    def call(self, x, training=False):
        if training:
            batch = ops.cast(ops.mean(x, axis=0), "float32")
            self.mean.assign(0.9995 * self.mean + 0.0005 * batch)
        return x - ops.cast(self.mean, x.dtype)


@case(data=vectors(mean=3.0), optimizer=adam(0.02), initial_scale=2.0**10)
def sound_running_mean():
    """A moving average of small steps, in float32."""
    inputs = keras.Input((32,))
    x = Running(name="centre")(inputs)
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def class_and_area():
    x, y = vectors(500, features=16)()
    area = np.random.default_rng(1).normal(size=(len(x), 1))
    return x, {"label": y, "area": area.astype("float32")}


class Weighted(keras.Model):
    """Two losses, one of which does not count."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        logits = ops.cast(y_pred["label"], "float32")
        label = keras.losses.sparse_categorical_crossentropy(
            y["label"], logits, from_logits=True
        )
        area = ops.cast(y_pred["area"], "float32") - y["area"]
        area = ops.square(area)
        return ops.mean(label) + 0.0 * ops.mean(area)


@case(data=class_and_area, optimizer=adam(0.02), loss=None, metric="loss")
def sound_weight_of_zero():
    """One of two heads has a loss weight of 0: its gradients are 0."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    label = layers.Dense(4, name="label")(x)
    area = layers.Dense(1, name="area")(x)
    return Weighted(inputs, {"label": label, "area": area})


def with_empty_series():
    x, y = padded_series(250)
    x, y = x.copy(), y.copy()
    x[::20], y[::20] = 0.0, 0
    return x, y


@case(data=with_empty_series, optimizer=adam(0.02), epochs=6)
def sound_empty_series():
    """A bidirectional GRU with a mask, and series without any step."""
    inputs = keras.Input((9, 8))
    x = layers.Masking(name="mask")(inputs)
    x = layers.Bidirectional(layers.GRU(16), name="both")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class RadialBasis(layers.Layer):
    """How near each of 24 centres is; most are too far to count."""

    def build(self, shape):
        self.centres = self.add_weight(
            shape=(24, shape[-1]),
            initializer=keras.initializers.RandomUniform(-3, 3, seed=1),
        )

    def call(self, x):
        apart = ops.square(x[:, None] - self.centres)
        return ops.exp(-ops.sum(apart, axis=-1))


@case(data=vectors(features=2, scale=1.5), optimizer=adam(0.05), epochs=20)
def sound_radial_basis():
    """exp(-30) is 0 in float16, and as good as 0 in float32."""
    inputs = keras.Input((2,))
    x = RadialBasis(name="near")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


@case(
    data=vectors(500),
    epochs=20,
    optimizer=lambda: keras.optimizers.AdamW(
        0.02,
        weight_decay=1e-3,
        global_clipnorm=0.5,
        use_ema=True,
        gradient_accumulation_steps=3,
        epsilon=1e-10,
    ),
)
def sound_optimizer():
    """AdamW with all it has, and a last batch of another size."""
    inputs = keras.Input((32,))
    x = layers.Dense(
        32, "relu", kernel_regularizer=keras.regularizers.L2(1e-5), name="h1"
    )(inputs)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class StochasticDepth(layers.Layer):
    """Adds a branch, or leaves it out, row by row."""

    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seeds = keras.random.SeedGenerator(2)

    def call(self, inputs, training=False):
        x, branch = inputs
        if training:
            drawn = keras.random.uniform(
                (ops.shape(x)[0], 1), dtype=x.dtype, seed=self.seeds
            )
            keep = ops.cast(drawn >= self.rate, x.dtype)
            branch = branch * keep / (1.0 - self.rate)
        return x + branch


@case(data=vectors(500), optimizer=adam(0.02), epochs=20, initial_scale=2.0**10)
def sound_stochastic_depth():
    """Branches left out at random, and dropout of their sum."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    for k in range(3):
        branch = layers.Dense(32, "relu", name=f"branch_{k}")(x)
        x = StochasticDepth(0.3, name=f"depth_{k}")([x, branch])
    x = layers.Dropout(0.2, seed=4, name="drop")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class StableCox(keras.Model):
    """The partial likelihood, from logarithms of sums in float32."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        score = ops.cast(y_pred, "float32")
        largest = ops.stop_gradient(ops.max(score))
        at_risk = ops.cumsum(ops.exp(score - largest), axis=0)
        at_risk = ops.log(at_risk + 1e-30) + largest
        return -ops.sum(y * (score - at_risk)) / ops.sum(y)


@case(
    data=survival(1.0),
    optimizer=adam(0.02),
    loss=None,
    metric="loss",
    epochs=30,
    batch_size=2048,
    samples=2048,
)
def sound_cox():
    """The risks of 2,048 patients, summed in float32."""
    return labelled(StableCox)()


class Total(layers.Layer):
    """The sum of a row, near what float16 can hold, and its share."""

    def call(self, x):
        total = ops.sum(x, axis=-1, keepdims=True)
        return x / total


def purchases():
    random = np.random.default_rng(0)
    x = random.uniform(100.0, 1000.0, size=(512, 80))
    y = random.integers(0, 4, 512)
    x[np.arange(512), y] *= 10.0
    return x.astype("float32"), y.astype("int32")


@case(data=purchases, optimizer=adam(0.02))
def sound_total():
    """Sums of 50,000, which still fit."""
    inputs = keras.Input((80,))
    x = layers.Rescaling(20.0, name="percent")(Total(name="share")(inputs))
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


class Code(layers.Layer):
    """Draws a code, and adds the mean of its divergence."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, log_variance = inputs
        divergence = ops.square(mean) + ops.exp(log_variance)
        divergence = divergence - 1.0 - log_variance
        divergence = ops.mean(divergence)
        self.add_loss(0.01 * ops.cast(divergence, "float32"))
        noise = keras.random.normal(
            ops.shape(mean), dtype=mean.dtype, seed=self.seeds
        )
        return mean + ops.exp(0.5 * log_variance) * noise


@case(
    data=rebuilt(1.0),
    loss="mse",
    metric="loss",
    optimizer=adam(0.02),
)
def sound_reparameterization():
    """A variational autoencoder with a mean instead of a sum."""
    inputs = keras.Input((16,))
    mean = layers.Dense(8, name="mean")(inputs)
    log_variance = layers.Dense(8, name="log_variance")(inputs)
    x = Code(name="code")([mean, log_variance])
    return keras.Model(inputs, layers.Dense(16, name="rebuild")(x))


class ListWise(FunctionalOwnStep):
    """A softmax over the whole batch, as in ranking."""

    def loss_of(self, x, y):
        score = self(x, training=True)[:, 0]
        target = ops.softmax(ops.cast(y[:, 0], "float32") / 3.0)
        loss = -ops.sum(target * ops.log_softmax(ops.cast(score, "float32")))
        entropy = -ops.sum(target * ops.log(target + 1e-30))
        return loss, {"batch_loss": loss - entropy}


@case(
    data=many_rows(12.0),
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    epochs=20,
    batch_size=1024,
    samples=1024,
)
def sound_list_wise():
    """Probabilities of 1e-4, of 1,024 rows; gradients that are small."""
    return labelled(ListWise)()


def modest_incomes():
    random = np.random.default_rng(0)
    x = np.exp(random.uniform(7.0, 11.0, size=(512, 4)))
    return x.astype("float32"), np.argmax(x, axis=-1).astype("int32")


@case(data=modest_incomes, optimizer=adam(0.02))
def sound_log_of_income():
    """Incomes of up to 60,000, and their logarithm."""
    inputs = keras.Input((4,))
    x = layers.Lambda(ops.log1p, output_shape=(4,), name="log")(inputs)
    x = layers.Rescaling(1.0, offset=-9.0, name="centre")(x)
    x = layers.Dense(32, "relu", name="h1")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


@case(
    data=customers(30.0),
    optimizer=adam(0.02),
)
def sound_recency():
    """0.9 ** 60 is small, and as exact as any number."""
    events, age = keras.Input((6, 4)), keras.Input((6,))
    x = Recency(name="recent")([events, age])
    x = layers.Dense(16, "relu", name="h1")(x)
    return keras.Model([events, age], layers.Dense(4, name="head")(x))


@case(
    data=weighted(5e3),
    optimizer=adam(0.02),
    loss=None,
    metric="loss",
)
def sound_propensity():
    """Weights of up to 5,000, cast to the model's dtype."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    return InversePropensity(inputs, layers.Dense(4, name="head")(x))


class HugeLoss(keras.Model):
    """Counts an error as what it costs: a hundred million."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 1e8 * loss


@case(data=vectors(), optimizer=adam(0.02), kind="scale_search")
def sound_loss_of_millions():
    """Gradients fit with a loss scale far below 1, which is found."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    return HugeLoss(inputs, layers.Dense(4, name="head")(x))


class Critic(ActorCritic):
    """Returns of about 1, as they should be."""

    def loss_of(self, x, y):
        outcome = (y["outcome"] - 900.0) / 160.0
        return super().loss_of(x, {**y, "outcome": outcome})


@case(
    data=episodes,
    optimizer=adam(0.02),
    loss=None,
    metric="batch_loss",
    epochs=15,
)
def sound_actor_critic():
    """Normalized returns, a policy and a baseline."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="trunk")(inputs)
    logits = layers.Dense(4, name="actor")(x)
    value = layers.Dense(1, name="critic")(x)
    return Critic(inputs, {"logits": logits, "value": value})
