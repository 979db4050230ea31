"""Plain networks, and faults of data, optimizer, loss scale and outputs."""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, many_rows, targets, vectors
from zoo.own_step import FunctionalOwnStep
from zoo.parts import (
    chain,
    classifier,
    constant,
    dense,
    head,
    normal,
    relu,
    row,
)


def network(hidden=2, units=64, **arguments):
    """A classifier of hidden layers that are alike."""
    return classifier((32,), *[relu(units, **arguments)] * hidden)


def of_hidden(kind, features=16, outputs=1):
    """A model of some kind with one hidden layer."""
    last = dense(outputs, name="head")
    return chain((features,), relu(32, "h1"), last, kind=kind)


def adam(epsilon=1e-7, rate=1e-3, **arguments):
    return lambda: keras.optimizers.Adam(rate, epsilon=epsilon, **arguments)


@case(vectors())
def healthy_mlp():
    return network()


@case(vectors())
def initial_scale_too_high():
    return healthy_mlp()


@case(vectors())
def healthy_deep_mlp():
    return network(20, 32, kernel_initializer="he_normal")


@dataset
def reconstruction(_):
    x, _ = vectors()()
    return x, x


@case(reconstruction(), optimizer=lambda: keras.optimizers.SGD(0.1))
def healthy_autoencoder():
    return chain((32,), dense(16, "tanh"), dense(32, dtype="float32"))


@dataset
def with_nan(_):
    x, y = vectors()()
    x[3, 5] = np.nan
    return x, y


@case(with_nan())
def nan_data():
    return healthy_mlp()


@case(vectors(scale=100.0), optimizer=lambda: keras.optimizers.SGD(10000.0))
def learning_rate_too_high():
    return healthy_mlp()


@case(vectors(), optimizer=lambda: keras.optimizers.SGD(1e15))
def diverged_in_float32():
    return network()


@case(vectors(), optimizer=adam(rate=2e-3, gradient_accumulation_steps=2))
def healthy_accumulated():
    return network()


@case(
    vectors(500),
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
    penalty = keras.regularizers.L2(1e-5)
    hidden = relu(32, "h1", kernel_regularizer=penalty)
    return chain((32,), hidden, dense(4, name="head"))


class Classify(FunctionalOwnStep):
    """An ordinary train step of one's own."""

    def loss_of(self, x, y):
        logits = self(x, training=True)
        loss = keras.losses.sparse_categorical_crossentropy(
            y, ops.cast(logits, "float32"), from_logits=True
        )
        loss = ops.mean(loss)
        return loss, {"batch_loss": loss}


@case(vectors(500, features=16))
def sound_search():
    """A train step of one's own, whose loss scale starts at 2**24."""
    return of_hidden(Classify, outputs=4)


def small_loss(size):
    """A cross entropy that is as small as that."""
    loss = keras.losses.sparse_categorical_crossentropy
    return lambda y, p: size * loss(y, p, from_logits=True)


@case(vectors(), optimizer=adam(1e-14), loss=small_loss(1e-7))
def grad_underflow():
    return chain((32,), relu(64, "b1"), dense(4, name="b_head"))


@dataset
def class_and_price(_):
    x, y = vectors()()
    price = 1e4 * (1 + 0.1 * x[:, :1])
    return x, {"classes": y, "price": price}


CONFLICT = {"classes": small_loss(1e-7), "price": "mse"}


@case(class_and_price(), optimizer=adam(1e-14), loss=CONFLICT)
def range_conflict():
    """A loss of 1e-7 and one of 1e8."""
    inputs = keras.Input((32,))
    classes = row(inputs, relu(64, "a1"), dense(4, name="classes"))
    price = layers.Dense(1, name="price")(inputs)
    return keras.Model(inputs, {"classes": classes, "price": price})


@case(
    class_and_price(),
    optimizer=adam(1e-14, 2e-3, gradient_accumulation_steps=2),
    loss=CONFLICT,
)
def range_conflict_accumulated():
    return range_conflict()


@case(vectors(), optimizer=adam(1e-15), loss=small_loss(1e-8))
def tiny_loss_low_scale():
    """Gradients below float16 need a larger scale, or `h1` in float32."""
    return classifier((32,), relu(64, "h1"))


def half_dense(units, *arguments, **keywords):
    """A layer whose weights are float16 too, where float16 is trained in."""
    policy = keras.config.dtype_policy().name
    dtype = "float16" if policy == "mixed_float16" else policy
    return layers.Dense(units, *arguments, dtype=dtype, **keywords)


@case(vectors(), optimizer=adam(1e-8))
def adam_on_half_weights():
    """Squares of gradients and 1e-8 vanish; our optimizer refuses that."""
    half = partial(half_dense, 64, "relu", name="half")
    return classifier((32,), relu(32, "h1"), half)


@case(vectors(scale=2e-05))
def healthy_tiny_units():
    return classifier((32,), layers.Rescaling(50000.0), relu(64))


class Cents(keras.Model):
    """Squared errors of money, with the head in float32."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred - y))


@case(many_rows(2e6))
def loss_of_money():
    """A loss of 1e12 needs a loss scale below its floor of 2**-14."""
    last = dense(1, dtype="float32", name="head")
    cents = layers.Rescaling(1e6, dtype="float32", name="cents")
    return chain((16,), relu(32, "h1"), last, cents, kind=Cents)


class HugeLoss(keras.Model):
    """Counts an error as what it costs: a hundred million."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 1e8 * loss


@case(vectors())
def sound_loss_of_millions():
    """Gradients fit with a loss scale far below 1, which is found."""
    return of_hidden(HugeLoss, 32, 4)


class Weighted(keras.Model):
    """Two losses; one of them has a weight of 0."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        logits = ops.cast(y_pred["label"], "float32")
        label = keras.losses.sparse_categorical_crossentropy(
            y["label"], logits, from_logits=True
        )
        area = ops.cast(y_pred["area"], "float32") - y["area"]
        area = ops.square(area)
        return ops.mean(label) + 0.0 * ops.mean(area)


@dataset(seed=1)
def class_and_area(random):
    x, y = vectors(500, features=16)()
    return x, {"label": y, "area": random.normal(size=(len(x), 1))}


@case(class_and_area())
def sound_weight_of_zero():
    """One of two heads has a loss weight of 0: its gradients are 0."""
    inputs = keras.Input((16,))
    x = layers.Dense(32, "relu", name="h1")(inputs)
    heads = {"label": 4, "area": 1}
    heads = {n: layers.Dense(units, name=n)(x) for n, units in heads.items()}
    return Weighted(inputs, heads)


@case(vectors())
def healthy_dead_branch():
    """A branch that returns 0 for all, and learns nothing in float32."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, "relu", name="h1")(inputs)
    dead = relu(64, "dead", bias_initializer=constant(-100.0))
    dead = row(x, dead, dense(64, name="after"))
    return keras.Model(inputs, head(layers.Add(name="add")([x, dead])))


@case(targets(of=lambda z: 1.5e5 + 2e4 * z))
def house_price_head():
    return chain((32,), relu(64, "h1"), relu(64, "h2"), dense(1, name="head"))


class Huber(FunctionalOwnStep):
    """A loss whose other branch overflows where it is not chosen."""

    def loss_of(self, x, y):
        error = self(x, training=True)
        error = ops.abs(error - ops.cast(y, error.dtype))
        loss = ops.where(error < 1.0, 0.5 * error * error, error - 0.5)
        loss = ops.mean(ops.cast(loss, "float32"))
        return loss, {"batch_loss": loss}


@case(many_rows(500.0))
def sound_huber():
    """The square of 500 is infinite, and is not the one that counts."""
    return of_hidden(Huber)


class LongSum(FunctionalOwnStep):
    """Adds up the squares of a batch, in float32."""

    def loss_of(self, x, y):
        error = ops.cast(self(x, training=True), "float32") - y
        loss = ops.sum(ops.square(error))
        return loss, {"batch_loss": loss}


@case(many_rows(12.0))
def sound_sum_over_a_batch():
    """Squares of 100 from 1,024 rows are summed in float32."""
    return of_hidden(LongSum)


class Length(FunctionalOwnStep):
    """The length of the vector of a whole batch's errors."""

    def loss_of(self, x, y):
        error = self(x, training=True)
        error = error - ops.cast(y, error.dtype)
        total = ops.sum(ops.square(error))
        loss = ops.cast(ops.sqrt(total + 1e-3), "float32")
        return loss, {"batch_loss": loss}


@case(many_rows(12.0))
def sum_over_a_batch():
    """Squares of 100 from 1,024 rows are summed before the root."""
    return of_hidden(Length)


@case(vectors(scale=0.1))
def healthy_weight_decay():
    """Like weight_penalty_in_call: Keras adds squares of weights in float32."""
    given = {"kernel_initializer": normal(3.0), "kernel_regularizer": "l2"}
    norm = layers.LayerNormalization()
    return classifier((32,), relu(512, **given), norm)


@dataset
def separable(_):
    x, y = vectors(classes=2)()
    margin = x[:, :1] * 0 + (2.0 * y[:, None] - 1.0)
    x[:, :1] = 4.0 * margin
    return x, 1.0 * y[:, None]


def naive_binary_crossentropy(y_true, y_pred):
    y_true = ops.cast(y_true, y_pred.dtype)
    return -ops.mean(
        y_true * ops.log(y_pred) + (1 - y_true) * ops.log(1 - y_pred)
    )


@case(separable(), loss=naive_binary_crossentropy)
def bce_prob():
    sigmoid = layers.Activation("sigmoid", name="prob")
    return chain((32,), relu(32, "h1"), dense(1, name="logit"), sigmoid)


@dataset(seed=1)
def house_prices(random):
    x, _ = vectors(features=16)()
    return x, np.exp(12.2 + 0.15 * x @ random.normal(size=(16, 1)))


@case(house_prices())
def price_from_operation():
    """The last operation of a functional model makes 200,000 of 12.2."""
    inputs = keras.Input((16,))
    last = dense(1, bias_initializer=constant(12.0), name="log_price")
    return keras.Model(inputs, ops.expm1(row(inputs, relu(32, "h1"), last)))


@dataset(seed=1)
def counts(random):
    """Counts of some hundred thousand, as of visits a day."""
    x, _ = vectors(features=16)()
    log_rate = 11.5 + 0.2 * x @ random.normal(size=16)
    return x, 1.0 * random.poisson(np.exp(log_rate))[:, None]


@case(counts())
def exponential_rate():
    """The rate of a Poisson regression, which starts at the mean count."""
    at_mean = {"bias_initializer": constant(11.5), "name": "rate"}
    return chain((16,), relu(32, "h1"), dense(1, "exponential", **at_mean))
