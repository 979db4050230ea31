"""Recurrent layers, cells and recursions."""

from functools import partial

import keras
import numpy as np
from keras import layers, ops

from zoo.case import case
from zoo.data import dataset, sequences, tokens, vectors
from zoo.parts import (
    Parts,
    chain,
    classifier,
    constant,
    dense,
    embedding,
    float32_loss,
    normal,
    relu,
    row,
)


@case(sequences())
def rnn_overflow():
    start = {"kernel_initializer": constant(1.0), "name": "rnn"}
    start["recurrent_initializer"] = "identity"
    scale = layers.Rescaling(1e-5, dtype="float32", name="scale")
    last = dense(1, name="out", dtype="float32")
    rnn = layers.SimpleRNN(8, "relu", **start)
    return chain((100, 1), rnn, scale, last)


@dataset
def increments(random, samples=256, length=50):
    """Returns a start of 20000, then small steps; the target is their sum."""
    x = random.uniform(0, 6, (samples, length, 1)).astype("float32")
    y = (x[:, 1:].sum(axis=1) - 147) / 12
    x[:, 0] = 20000
    y = y + 0.3 * random.normal(size=y.shape)
    return x, y


@case(increments())
def rnn_integrator():
    ones = dict.fromkeys(
        ["kernel_initializer", "recurrent_initializer"], "ones"
    )
    rnn = layers.SimpleRNN(1, None, **ones, trainable=False, name="rnn")
    scale = layers.Rescaling(1 / 12, -20147 / 12, dtype="float32")
    return classifier((50, 1), rnn, scale, dense(8, "tanh", name="h1"), units=1)


@case(tokens())
def healthy_recurrent():
    lstm = partial(layers.LSTM, 16, return_sequences=True, dropout=0.1)
    parts = embedding(20, 16, mask_zero=True), lstm, partial(layers.GRU, 16)
    return classifier((12,), *parts, dtype="int32")


@case(tokens())
def healthy_bidirectional():
    def both():
        return layers.Bidirectional(layers.GRU(8, return_sequences=True))

    def each():
        return layers.TimeDistributed(layers.Dense(8, "relu"))

    parts = embedding(20, 16), both, each, layers.Flatten()
    return classifier((12,), *parts, dtype="int32")


@dataset
def padded_series(random, samples=256, length=9):
    """Series with up to two empty steps in front."""
    y = random.integers(0, 4, samples)
    x = random.normal(size=(samples, length, 8))
    x[..., :4] += 2.0 * np.eye(4)[y][:, None]
    start = random.integers(0, 3, samples)
    x *= (np.arange(length) >= start[:, None])[..., None]
    return x, y


@keras.saving.register_keras_serializable("zoo")
class NormCell(layers.Layer):
    """A recurrent cell that normalizes what it adds up."""

    state_size = output_size = 16

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 16))
        self.recurrent = self.add_weight((16, 16))

    def call(self, x, states):
        z = ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent)
        z = z - ops.mean(z, axis=-1, keepdims=True)
        variance = ops.mean(z * z, axis=-1, keepdims=True)
        z = ops.tanh(z / ops.sqrt(variance + 1e-8))
        return z, [z]


@case(padded_series())
def norm_cell_in_front():
    """A cell of one's own, in both directions: only forwards it is 0 / 0."""
    rnn = layers.RNN(NormCell(name="norm_cell"), name="rnn")
    both = layers.Bidirectional(rnn, name="both")
    return chain((9, 8), both, dense(4, name="head"))


@dataset
def with_empty_series(_):
    x, y = padded_series(250)()
    x[::20], y[::20] = 0.0, 0
    return x, y


@case(with_empty_series())
def sound_empty_series():
    """A bidirectional GRU with a mask, and series without any step."""
    mask = layers.Masking(name="mask")
    both = layers.Bidirectional(layers.GRU(16), name="both")
    return chain((9, 8), mask, both, dense(4, name="head"))


@dataset
def recent(random, samples=128, length=200):
    x = random.normal(size=(samples, length, 4)).astype("float32")
    return x, np.argmax(x[:, -4:].sum(axis=1), axis=-1)


class Scan(layers.Layer):
    """h_t = a h_(t-1) + x_t, by a running product and a running sum."""

    def build(self, input_shape):
        self.decay = self.add_weight(input_shape[-1:], constant(2.2))

    def call(self, x):
        decay = ops.broadcast_to(ops.sigmoid(self.decay), ops.shape(x))
        product = ops.cumprod(decay, axis=1)
        return (ops.cumsum(x / product, axis=1) * product)[:, -1]


@case(recent())
def selective_scan():
    """State space models: what is divided by a running product of decays
    overflows, and the product vanishes.
    """
    return classifier((200, 4), dense(8, name="h1"), Scan(name="scan"))


@dataset
def tagged(_, tags):
    """Words, and the tags of all of them, as an input too."""
    x, _ = tokens()()
    return (x, np.eye(tags)[x % tags]), x % tags


class LinearChain(layers.Layer):
    """Adds log Z - score of a chain, summing exponentials as they are."""

    def build(self, input_shape):
        labels = input_shape[0][-1]
        self.moves = self.add_weight((labels, labels))

    def call(self, inputs):
        emissions, labels = inputs
        score = ops.sum(emissions * labels, axis=(1, 2))
        alpha = emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            paths = alpha[:, :, None] + self.moves + emissions[:, t, None]
            alpha = ops.log(ops.sum(ops.exp(paths), axis=1))
            moves = ops.matmul(labels[:, t - 1], self.moves) * labels[:, t]
            score = score + ops.sum(moves, axis=-1)
        log_z = ops.log(ops.sum(ops.exp(alpha), axis=-1))
        self.add_loss(ops.cast(ops.mean(log_z - score), "float32"))
        return emissions


def tagger(layer, tags, activation):
    """Returns a model of a layer that is given emissions and tags."""
    inputs = keras.Input((12,), dtype="int32"), keras.Input((12, tags))
    emissions = dense(tags, activation, name="emissions")
    x = row(inputs[0], embedding(20, 16), relu(16, "h1"), emissions)
    x = layer([x, inputs[1]])
    linear = layers.Activation("linear", dtype="float32")
    return keras.Model(inputs, linear(x))


@case(tagged(4))
def linear_chain_crf():
    return tagger(LinearChain(name="chain"), 4, "tanh")


class HiddenMarkov(layers.Layer):
    """Adds -log of the probability of a sequence, by the forward recursion."""

    def build(self, input_shape):
        self.moves = self.add_weight((8, 8))

    def call(self, inputs):
        x, labels = inputs
        moves = ops.softmax(self.moves)
        alpha = x[:, 0] * labels[:, 0]
        for t in range(1, x.shape[1]):
            alpha = ops.matmul(alpha, moves) * x[:, t] * labels[:, t]
        likelihood = ops.sum(alpha, axis=-1)
        self.add_loss(float32_loss(-ops.mean(ops.log(likelihood + 1e-30))))
        return x


@case(tagged(8))
def sequence_probability():
    """CTC by hand: a product of 12 probabilities is 0."""
    return tagger(HiddenMarkov(name="markov"), 8, "softmax")


@dataset
def spoken(random, samples=96, length=24):
    """Frames of sound and the letters that are spoken."""
    y = random.integers(1, 6, (samples, 4))
    x = np.repeat(np.eye(6, dtype="float32")[y], length // 4, axis=1)
    return x + random.normal(0.0, 0.2, x.shape).astype("float32"), y


@case(spoken(), loss=keras.losses.CTC())
def healthy_ctc():
    """Keras computes the loss in float32, as sums of logarithms."""
    first = partial(layers.Conv1D, 16, 3, padding="same", activation="relu")
    return chain((24, 6), first, dense(7, dtype="float32"))


class Euler(Parts):
    """64 small steps along one learned field, and how far they led."""

    def call(self, start):
        x = start
        for _ in range(64):
            x = ops.add(x, self.field(x) * 2.0**-12)
        moved = ops.subtract(x, start) * 64.0
        return self.head(ops.concatenate([moved, self.h1(moved)], -1))


@case(vectors(mean=4.0))
def euler_steps():
    """Neural differential equations: steps below half an ulp are lost."""
    return Euler(
        field=dense(32, "tanh", kernel_initializer=normal(0.05)),
        h1=relu(32),
        head=dense(4, dtype="float32"),
    )
