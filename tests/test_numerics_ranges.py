"""Measured ranges agree with the next step, and do not change it."""

import keras
import numpy as np
import pytest
from keras import layers, ops, tree
from monitor_models import each_jit, monitor, only_tensorflow, told
from optimizer_models import BACKEND, numbers, rarely
from tuner_models import Squares

import keras_mixprec as kmp
from keras_mixprec.numerics.layer_replay import cause_of_nonfinite
from keras_mixprec.numerics.range_reading import read_ranges
from keras_mixprec.policies.layers import walk

sgd = keras.optimizers.SGD
JIT = BACKEND == "jax"
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 6)).astype("float32")
Y = RANDOM.normal(size=(48, 2)).astype("float32")


def read(model, x=X, y=Y, batch_size=8):
    """The readings by path, of the first batch after a step on each."""
    model.fit(x, y, batch_size, shuffle=False, verbose=0)
    batch = x[:batch_size], y[:batch_size]
    found = read_ranges(model, tree.map_structure(ops.convert_to_tensor, batch))
    assert found.failures == {}
    return {r.path: r for r in found.readings}


def sequential(*parts, shape=(6,), dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def compiled(model, jit=JIT, optimizer="adam", **arguments):
    kmp.apply_policy(model, "mixed_float16", rules=[])
    optimizer = kmp.LossScaleOptimizer(optimizer, **arguments.pop("scale", {}))
    model.compile(optimizer, loss="mse", jit_compile=jit, **arguments)
    return model


@each_jit
def test_numbers_are_those_of_the_step(jit):
    # y = w * x with w = 1 that stays, loss = mean(y * y).
    dense = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = compiled(sequential(dense, shape=(1,)), jit, sgd(0.0))
    x, y = np.full((8, 1), 0.5, "float32"), np.zeros((8, 1))
    dense = read(model, x, y, batch_size=4)["dense"]
    scale = 2.0**15
    # 2 * y / 4 rows at the output, and summed over the rows times x.
    found = {p: (s.largest, s.size) for p, s in dense.parts.items()}
    assert found == {
        "activation": (0.5, 4),
        "gradient": (scale * 2 * 0.5 / 4, 4),
        "weight_gradient": (2 * 0.5 * 0.5, 1),
        "weight": (1.0, 1),
    }
    assert dense.lost_updates is None  # The learning rate is zero.


class Twice(keras.Model):
    """Subclassed, with a shared layer, nested ones and a step of its own."""

    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(6, name="shared")
        self.inner = keras.Sequential(
            [layers.Dense(4, name="first")], name="inner"
        )
        self.rnn = layers.SimpleRNN(2, name="rnn")

    def call(self, x):
        x = self.shared(self.shared(x))
        out = self.inner(x)
        return self.rnn(ops.reshape(out, (-1, 2, 2)))

    def train_step(self, *args):
        self.stepped = True
        return super().train_step(*args)


@pytest.mark.long
@each_jit
def test_calls_are_distinct_and_in_order(jit):
    model = Twice()
    model(X[:1])
    readings = read(compiled(model, jit))
    activations = [p for p, r in readings.items() if "activation" in r.parts]
    (cell,) = [p for p in readings if p.startswith("rnn/")]
    assert activations == ["shared", "shared#1", "inner/first", "rnn", cell]
    # The layer returns the outputs of its cell.
    own, of_layer = readings[cell].parts, readings["rnn"].parts
    assert set(own) == {"activation", "gradient", "weight", "weight_gradient"}
    assert own["activation"].largest == of_layer["activation"].largest
    assert model.stepped
    assert "train_step" not in vars(model)


def middle():
    yield layers.Dense(16, activation="gelu")
    yield layers.LayerNormalization()
    yield layers.Dropout(0.3)
    yield layers.BatchNormalization()


@pytest.mark.long
@each_jit
def test_a_run_that_is_read_is_the_same_run(jit, tmp_path):
    # XLA may fuse, and so round, differently: an ulp of float32 in each of 24
    # steps, against weights of about 1.
    atol, weights = 24 * 2.0**-23 * jit, []
    for callbacks in ([], [monitor(tmp_path, probe_every=1)]):
        keras.utils.set_random_seed(1)
        model = sequential(*middle(), layers.Dense(2))
        compiled(model, jit, keras.optimizers.AdamW(0.01))
        arguments = {"epochs": 4, "shuffle": False, "verbose": 0}
        model.fit(X, Y, 8, callbacks=callbacks, **arguments)
        weights.append(numbers(model.weights))
    [event] = told(tmp_path, "ranges_measured")
    assert event["steps"] == [*range(1, 25)]
    for weight, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(weight, expected, 0, atol)


@each_jit
def test_what_the_dtype_cannot_hold_is_not_finite(jit):
    model = compiled(sequential(Squares(), Squares(), layers.Dense(2)), jit)
    found = read(model, np.full((48, 6), 16.0, "float32"))
    assert found["squares"].parts["activation"].largest == 256.0
    squares = found["squares_1"].parts["activation"]
    # XLA keeps 65536 in float32, and float16 does not have this number.
    assert squares.nonfinite == squares.size
    assert squares.largest == 0.0


# XLA compiles each shape, which takes 25 s on two cores, so it is slow.
SHAPES = {
    "tensorflow": [(False, 2), pytest.param(True, 1, marks=pytest.mark.slow)],
    "jax": [(True, 2)],
    "torch": [(False, 1)],
}[BACKEND]


@pytest.mark.long
@pytest.mark.parametrize(("jit", "steps"), SHAPES)
def test_shapes_that_change_from_batch_to_batch(jit, steps, tmp_path):
    """Layers over axes whose lengths differ from batch to batch."""
    images = keras.Input((None, None, 3))
    words = keras.Input((None,), dtype="int32")
    x = layers.Conv2D(2, 3, padding="same", name="convolution")(images)
    x = layers.GlobalAveragePooling2D()(x)
    y = layers.Embedding(5, 2, mask_zero=True, name="embedding")(words)
    y = layers.GlobalAveragePooling1D()(y)
    y = layers.Dense(2, name="head")(layers.Concatenate()([x, y]))
    model = keras.Model([images, words], y)
    model = compiled(model, jit, steps_per_execution=steps)

    def batches():
        for rows, side in [(4, 3), (4, 2), (3, 5), (3, 5)]:
            images = np.full((rows, side, side, 3), 2.0, "float32")
            yield (images, np.ones((rows, side), "int32")), np.zeros((rows, 2))

    watcher = monitor(tmp_path, probe_every=1)
    model.fit(
        batches(),
        steps_per_epoch=4,
        shuffle=False,
        verbose=0,
        callbacks=[watcher],
    )
    assert told(tmp_path, "probe_failed") == []
    [event] = told(tmp_path, "ranges_measured")
    assert event["steps"] == [*range(steps, 5, steps)]


@pytest.mark.parametrize("wrap", [kmp.LossScaleOptimizer, lambda inner: inner])
@pytest.mark.parametrize(
    ("rate", "accumulated", "expected"),
    [(2.0**-40, None, 1.0), (2.0**-4, 3, 0.0), rarely(2.0**-4, 4, None)],
)
def test_updates_are_lost_only_where_there_is_one(
    wrap, rate, accumulated, expected
):
    # The sixth step: the second update of three gradients each, or the second
    # gradient of an update of four.
    model = sequential(layers.Dense(2, None, False))
    inner = sgd(rate, gradient_accumulation_steps=accumulated)
    model.compile(wrap(inner), "mse", jit_compile=JIT)
    assert read(model, X[:40], Y[:40])["dense"].lost_updates == expected


UPDATES = {
    "sgd": lambda: sgd(3e-7),
    "adam": lambda: keras.optimizers.Adam(3e-8, weight_decay=0.1, clipnorm=1.0),
    "ema": lambda: keras.optimizers.RMSprop(1e-8, use_ema=True),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # From Keras 3.14 on.
    UPDATES["several"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(UPDATES["adam"](), {"dense": sgd(3e-7)})
    )


@pytest.mark.parametrize("name", UPDATES)
def test_lost_updates_are_those_of_the_next_step(name):
    model = sequential(layers.Dense(64, None, False), layers.Dense(2))
    found = read(compiled(model, JIT, UPDATES[name]()))
    before = numbers(model.weights)
    model.train_on_batch(X[:8], Y[:8])
    lost = np.mean(before[0] == model.layers[0].kernel.numpy())
    assert 0.05 < lost < 0.95
    assert found["dense"].lost_updates == pytest.approx(
        lost, abs=1e-9 + 0.02 * JIT
    )


@only_tensorflow
@each_jit
def test_repeated_rows_of_tables_of_other_lengths(jit):
    # As the tokens and the segments of BERT: (8, 3, 2) are used of either.
    ids = keras.Input((3,), batch_size=8, dtype="int32")
    tables = [layers.Embedding(n, 2, name=f"of_{n}") for n in (5, 7)]
    x = layers.Add()([table(ids) for table in tables])
    model = compiled(keras.Model(ids, layers.Flatten()(x)), jit)
    x = np.array([[0, 1, 1]] * 16)
    found = read(model, x, np.zeros((16, 6)))
    for rows in (5, 7):
        parts = found[f"of_{rows}"].parts
        assert parts["weight"].size == 2 * rows
        # The rows of the batch, not of the table.
        assert parts["weight_gradient"].size == 8 * 3 * 2
        assert found[f"of_{rows}"].lost_updates is None


class TinyAttention(layers.Layer):
    """As KerasHub's T5 does, with a mask that is added."""

    def call(self, x, _):
        logits = ops.matmul(x, ops.swapaxes(x, 1, 2))
        mask = -1e9 * (1 - ops.tri(x.shape[1]))
        weights = ops.softmax(logits + ops.cast(mask, x.dtype))
        return ops.matmul(weights, x)


def own(x, layer):
    return np.einsum("bth,bsh->bts", x, x) * np.tri(x.shape[1])


def projected(x, layer):
    def of(dense):
        kernel, bias = numbers(dense.weights)
        return np.einsum("btf,fnh->btnh", x, kernel.astype("float64")) + bias

    query, key = of(layer._query_dense), of(layer._key_dense)
    return np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(4.0)


LAYERS = {
    "fused": (lambda: layers.MultiHeadAttention(2, 4), projected),
    "own": (TinyAttention, own),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["fused", "own"])
def test_the_largest_attention_logit_is_that_of_numpy(name):
    sequences = np.random.default_rng(0).normal(size=(8, 5, 6))
    sequences[3] *= 4.0
    data = sequences.astype("float32"), np.ones((8, 2))
    keras.utils.set_random_seed(0)
    make, logits = LAYERS[name]
    layer, inputs = make(), keras.Input((5, 6))
    x = layers.Dense(2)(layers.Flatten()(layer(inputs, inputs)))
    model = keras.Model(inputs, layers.Softmax()(x))
    model.compile("sgd", "mse", jit_compile=JIT)
    found = {
        path: reading.parts["attention_logits"].largest
        for path, reading in read(model, *data).items()
        if "attention_logits" in reading.parts
    }
    known = np.abs(logits(data[0].astype("float64"), layer)).max()
    assert found == {walk(model)[0].path: pytest.approx(known, rel=1e-3)}


def test_products_of_attention_in_float16_run_one_by_one():
    # On JAX one of them asks for a kind that CPUs do not have.
    query = np.random.default_rng(0).normal(size=(1, 4, 2, 8))
    tensors = [ops.convert_to_tensor(query, "float16")] * 3

    def attention(tensors):
        return [ops.dot_product_attention(*tensors)]

    assert cause_of_nonfinite(attention, tensors) is None
