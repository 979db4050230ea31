"""A probed step measures what the plain step computes, and is that step."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import (
    BACKEND,
    JITS,
    assert_identical,
    each_jit,
    numbers,
    only_tensorflow,
    rarely,
)
from zoo import gan as zoo

import keras_mixprec as kmp
from keras_mixprec.formats import get_format
from keras_mixprec.numerics import collector as collector_module
from keras_mixprec.numerics.layer_replay import cause_of_nonfinite
from keras_mixprec.numerics.probed_step import Probe
from keras_mixprec.numerics.range_reading import read_ranges
from keras_mixprec.policies.layers import walk

sgd = keras.optimizers.SGD
JIT = BACKEND == "jax"
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 6)).astype("float32")
Y = RANDOM.normal(size=(48, 2)).astype("float32")


class Probing(keras.callbacks.Callback):
    """Probes every step but the first."""

    def __init__(self):
        super().__init__()
        self.probe = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.probe is None and batch:
            own, call = self.model.train_function, layers.Layer.__call__
            self.probe = Probe(self.model)
            # What the model has is left as it was.
            assert self.model.train_function is own
            assert layers.Layer.__call__ is call
            assert self.probe.read() == []
            self.model.train_function = self.probe.train_function

    def readings(self):
        return {r.path: r for r in self.probe.read()}


def probed(model, x=X, y=Y, **arguments):
    probing = Probing()
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0} | arguments
    model.fit(x, y, callbacks=[probing], **arguments)
    return probing


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
    dense = probed(model, x, y, batch_size=4).readings()["dense"]
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


@each_jit
def test_calls_are_distinct_and_in_order(jit):
    model = Twice()
    model(X[:1])
    probing = probed(compiled(model, jit))
    readings = probing.readings()
    activations = [p for p, r in readings.items() if "activation" in r.parts]
    (cell,) = [p for p in readings if p.startswith("rnn/")]
    assert activations == ["shared", "shared#1", "inner/first", "rnn", cell]
    # What it computes is what the layer returns.
    own, of_layer = readings[cell].parts, readings["rnn"].parts
    assert set(own) == {"activation", "gradient", "weight", "weight_gradient"}
    assert own["activation"].largest == of_layer["activation"].largest
    assert probing.probe.failures == {}
    assert model.stepped
    assert "train_step" not in vars(model)


def middle():
    yield layers.Dense(16, activation="gelu")
    yield layers.LayerNormalization()
    yield layers.Dropout(0.3)
    yield layers.BatchNormalization()


def merged():
    """Factors that TensorFlow's graph optimizer makes one of.

    It does of gelu's 0.5 and of dropout's 1 / 0.7, unless somebody looks at
    what is in between.
    """
    yield layers.Dense(16, activation="gelu")
    yield layers.Dropout(0.3)


# XLA may fuse, and so round, differently: an ulp of float32 in each of 24
# steps, against weights of about 1. What is merged is rounded otherwise by an
# ulp of float16 of the gradients, 24 times a step of 0.01.
RUNS = [
    *(
        pytest.param(middle, jit, 24 * 2.0**-23 * jit, marks=marks)
        for jit, marks in zip(JITS, ([], pytest.mark.slow), strict=False)
    ),
    pytest.param(merged, False, 24 * 0.01 * 2.0**-6, marks=only_tensorflow),
]


@pytest.mark.parametrize(("parts", "jit", "atol"), RUNS)
def test_a_probed_run_is_the_same_run(parts, jit, atol):
    weights = []
    for callbacks in ([], [Probing()]):
        keras.utils.set_random_seed(1)
        model = sequential(*parts(), layers.Dense(2))
        compiled(model, jit, keras.optimizers.AdamW(0.01))
        arguments = {"epochs": 4, "shuffle": False, "verbose": 0}
        model.fit(X, Y, 8, callbacks=callbacks, **arguments)
        weights.append(numbers(model.weights))
    assert callbacks[0].readings()
    for weight, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(weight, expected, 0, atol)


class Squares(layers.Layer):
    def call(self, x):
        return x * x


@each_jit
def test_what_the_dtype_cannot_hold_is_not_finite(jit):
    model = compiled(sequential(Squares(), Squares(), layers.Dense(2)), jit)
    found = probed(model, np.full((48, 6), 16.0)).readings()
    assert found["squares"].parts["activation"].largest == 256.0
    squares = found["squares_1"].parts["activation"]
    # 65536 is kept in float32 by XLA, and is none of float16's numbers.
    assert squares.nonfinite == squares.size
    assert squares.largest == 0.0


@each_jit
def test_small_numbers_are_counted_and_exponents_are_not(jit):
    model = sequential(layers.Rescaling(2.0**-15), layers.Dense(2))
    row = [0.0, 1.0, 4.0, 2.0**-9, 2.0**-12, 3.0]
    x = np.tile(np.float32(row), (48, 1))
    found = probed(compiled(model, jit), x).readings()
    small = found["rescaling"].parts["activation"]
    scaled = np.float16(row) * np.float16(2.0**-15)
    limits = np.finfo("float16")
    subnormal = (scaled > 0) & (scaled < limits.smallest_normal)
    assert small.zero == np.mean(scaled == 0)
    assert small.subnormal(get_format("float16")) == np.mean(subnormal)
    gradients = found["dense"].parts["weight_gradient"]
    # Those of a column of zeros, and of what is 0 in float16.
    assert gradients.zero * gradients.size == 2 * 2
    assert not len(small.bins())


def test_a_skipped_step_says_what_was_not_finite():
    model = sequential(layers.Dense(2))
    compiled(model, scale={"initial_scale": 2.0**30})
    dense = probed(model, X[:16], Y[:16]).readings()["dense"]
    assert dense.parts["gradient"].nonfinite
    assert dense.parts["weight_gradient"].nonfinite
    assert dense.parts["weight"].nonfinite == 0
    assert dense.lost_updates is None


# Where both are possible XLA compiles each shape: 25 s on two cores.
SHAPES = {
    "tensorflow": [(False, 2), pytest.param(True, 1, marks=pytest.mark.slow)],
    "jax": [(True, 2)],
    "torch": [(False, 1)],
}[BACKEND]


@pytest.mark.parametrize(("jit", "steps"), SHAPES)
def test_shapes_that_change_from_batch_to_batch(jit, steps, capfd):
    """Layers over axes whose lengths nobody knows before a batch comes."""
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

    probing = probed(model, batches(), None, batch_size=None, steps_per_epoch=4)
    assert probing.probe.failures == {}
    found = {
        p: r.parts["activation"].size for p, r in probing.readings().items()
    }
    assert found["convolution"] == 3 * 5 * 5 * 2
    assert (found["embedding"], found["head"]) == (3 * 5 * 2, 3 * 2)
    assert "AutoGraph" not in "".join(capfd.readouterr())


def test_small_tensors_are_measured_together(monkeypatch):
    stacks, put_stack = {}, collector_module.Collector.put_stack

    def counted(collector, keys, stack):
        stacks.setdefault(collector, []).append(keys)
        put_stack(collector, keys, stack)

    monkeypatch.setattr(collector_module.Collector, "put_stack", counted)
    inputs = x = keras.Input((6,))
    for _ in range(9):
        x = layers.Dense(6, kernel_initializer="identity")(x)
    # Twice the rows, which is not known before the step.
    for name, width in (("halves", 3), ("whole", 6)):
        reshaped = functools.partial(ops.reshape, newshape=(-1, width))
        x = layers.Lambda(reshaped, output_shape=(width,), name=name)(x)
    model = compiled(keras.Model(inputs, x), JIT, sgd(0.0))
    found = probed(model, X, X).readings()["halves"].parts["activation"]
    last = X[-8:].astype("float16").astype("float64")
    assert found.largest == np.abs(last).max()
    assert found.rms == pytest.approx(np.sqrt(np.mean(last**2)), rel=1e-6)
    assert found.size == last.size
    # Of 11 layers with activation and gradient, 9 of them with weights.
    assert all(len(keys) <= 8 for keys in stacks.values())


def rate_of_zero():
    return keras.optimizers.schedules.PiecewiseConstantDecay([9], [0.0, 1.0])


@pytest.mark.parametrize("wrap", [kmp.LossScaleOptimizer, lambda inner: inner])
@pytest.mark.parametrize(
    ("rate", "accumulated", "expected"),
    [
        (2.0**-40, None, 1.0),
        (2.0**-4, 3, 0.0),
        rarely(2.0**-4, 4, None),
        rarely(rate_of_zero(), None, None),
    ],
)
def test_updates_are_lost_only_where_there_is_one(
    wrap, rate, accumulated, expected
):
    # The last of six steps: the second update of three gradients each, or
    # the second gradient of an update of four.
    model = sequential(layers.Dense(2, None, False))
    inner = sgd(rate, gradient_accumulation_steps=accumulated)
    model.compile(wrap(inner), "mse", jit_compile=JIT)
    assert probed(model).readings()["dense"].lost_updates == expected


@pytest.mark.one_backend
def test_bfloat16_is_its_own_measure():
    model = sequential(layers.Dense(2))
    kmp.apply_policy(model, "mixed_bfloat16", rules=[])
    model.compile("adam", "mse", jit_compile=JIT)
    assert probed(model).probe.limits.name == "bfloat16"


@pytest.mark.usefixtures("training_goes_on")
def test_a_layer_that_cannot_be_measured_is_named(monkeypatch):
    def picky(tensor, limits):
        if tensor.shape[-1] == 3:
            raise TypeError("no threes")
        return original(tensor, limits)

    original = collector_module.measure
    monkeypatch.setattr(collector_module, "measure", picky)
    model = sequential(layers.Dense(3, name="three"), layers.Dense(2))
    probing = probed(compiled(model))
    assert list(probing.probe.failures) == ["three"]
    assert "no threes" in probing.probe.failures["three"]
    assert "dense" in probing.readings()
    assert model.optimizer.attempted_steps == 6


@only_tensorflow
@each_jit
def test_repeated_rows_of_tables_of_other_lengths(jit):
    # As the tokens and the segments of BERT: (8, 3, 2) are used of either.
    ids = keras.Input((3,), batch_size=8, dtype="int32")
    tables = [layers.Embedding(n, 2, name=f"of_{n}") for n in (5, 7)]
    x = layers.Add()([table(ids) for table in tables])
    model = compiled(keras.Model(ids, layers.Flatten()(x)), jit)
    x = np.array([[0, 1, 1]] * 16)
    found = probed(model, x, np.zeros((16, 6))).readings()
    for rows in (5, 7):
        parts = found[f"of_{rows}"].parts
        assert parts["weight"].size == 2 * rows
        # The rows of the batch, not of the table.
        assert parts["weight_gradient"].size == 8 * 3 * 2
        assert found[f"of_{rows}"].lost_updates is None


class Together(zoo.Gan):
    apply = staticmethod(kmp.LossScaleOptimizer.apply_together)
    stateless_apply = staticmethod(
        kmp.LossScaleOptimizer.stateless_apply_together
    )


@pytest.mark.one_backend
def test_optimizers_that_skip_together_are_both_measured():
    weights = []
    for callbacks in ([], [Probing()]):
        keras.utils.set_random_seed(0)
        model = Together(layers.Rescaling(1 / 300))
        noise, real = (values[:64] for values in zoo.ring()())
        arguments = {"shuffle": False, "verbose": 0}
        model.fit(noise, real, 32, callbacks=callbacks, **arguments)
        weights.append(model.get_weights())
    assert_identical(*weights)
    readings = callbacks[0].readings()
    told = {p for p, r in readings.items() if "weight_gradient" in r.parts}
    assert told == {"generator/g1", "generator/g2"} | {
        f"critic/c{number}" for number in (1, 2, 3)
    }
    for path in told:
        player, layer = path.split("/")
        values = numbers(getattr(model, player).get_layer(layer).weights)
        parts = readings[path].parts
        assert parts["weight"].largest == max(np.abs(w).max() for w in values)
        assert parts["weight_gradient"].rms > 0
        assert readings[path].lost_updates < 1
    assert model.judge.attempted_steps == 2


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
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(4.0)


LAYERS = {
    "fused": (lambda: layers.MultiHeadAttention(2, 4), projected),
    "softmax": (
        lambda: layers.MultiHeadAttention(2, 4, dropout=0.1),
        projected,
    ),
    "grouped": (lambda: layers.GroupQueryAttention(4, 4, 2), projected),
    "own": (TinyAttention, own),
}


@pytest.mark.parametrize(
    "name", ["fused", rarely("softmax"), rarely("grouped"), "own"]
)
def test_the_largest_attention_logit_is_that_of_numpy(name):
    sequences = np.random.default_rng(0).normal(size=(8, 5, 6))
    sequences[3] *= 4.0
    data = sequences.astype("float32"), np.ones((8, 2))
    weights = []
    for callbacks in ([], [Probing()]):
        keras.utils.set_random_seed(0)
        make, logits = LAYERS[name]
        layer, inputs = make(), keras.Input((5, 6))
        x = layers.Dense(2)(layers.Flatten()(layer(inputs, inputs)))
        built = keras.Model(inputs, layers.Softmax()(x))
        built.compile("sgd", "mse", jit_compile=JIT)
        built.optimizer.build(built.trainable_variables)
        built.fit(*data, 4, 1, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(built.get_weights())
        if not callbacks:
            known = np.abs(logits(data[0].astype("float64"), layer)).max()
            found = {
                reading.path: reading.parts["attention_logits"].largest
                for reading in read_ranges(built, data).readings
                if "attention_logits" in reading.parts
            }
            expected = pytest.approx(known, rel=1e-3)
            assert found == {walk(built)[0].path: expected}
    # A probed step measures it and changes nothing.
    parts = callbacks[0].readings()[walk(built)[0].path].parts
    assert parts["attention_logits"].largest > 0
    for plain, probed in zip(*weights, strict=True):
        np.testing.assert_allclose(probed, plain, rtol=2e-6, atol=1e-7)


def test_products_of_attention_in_float16_run_one_by_one():
    # On JAX one of them asks for a kind that CPUs do not have.
    query = np.random.default_rng(0).normal(size=(1, 4, 2, 8))
    tensors = [ops.convert_to_tensor(query, "float16")] * 3

    def attention(tensors):
        return [ops.dot_product_attention(*tensors)]

    assert cause_of_nonfinite(attention, tensors) is None
