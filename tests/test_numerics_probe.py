"""A probed step measures what the plain step computes, and is that step."""

import functools
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import BACKEND, JITS, each_jit, not_torch, one_weight
from optimizer_models import numbers, only_jax, only_tensorflow

import keras_mixprec as kmp
from keras_mixprec.formats import get_format
from keras_mixprec.numerics import collector as collector_module
from keras_mixprec.numerics.probed_step import Probe

JIT = next(iter(JITS))
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
            self.probe = Probe(self.model)
            self.model.train_function = self.probe.train_function

    def readings(self):
        return {r.path: r for r in self.probe.read()}


def probed(model, x=X, y=Y, **arguments):
    probing = Probing()
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0} | arguments
    model.fit(x, y, callbacks=[probing], **arguments)
    return probing


def compiled(model, jit=JIT, optimizer="adam", **arguments):
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(
        kmp.LossScaleOptimizer(optimizer, **arguments.pop("scale", {})),
        loss="mse",
        jit_compile=jit,
        **arguments,
    )
    return model


@each_jit
def test_numbers_are_those_of_the_step(jit):
    # y = w * x with w = 1 that stays, loss = mean(y * y).
    model = one_weight(jit=jit)
    probing = probed(
        model, np.full((8, 1), 0.5, "float32"), np.zeros((8, 1)), batch_size=4
    )
    dense = probing.readings()["dense"]
    scale = 2.0**15
    of = {part: found.largest for part, found in dense.parts.items()}
    # 2 * y / 4 rows at the output, and summed over the rows times x.
    assert of == {
        "activation": 0.5,
        "gradient": scale * 2 * 0.5 / 4,
        "weight_gradient": 2 * 0.5 * 0.5,
        "weight": 1.0,
    }
    assert {p: s.size for p, s in dense.parts.items()} == {
        "activation": 4,
        "gradient": 4,
        "weight_gradient": 1,
        "weight": 1,
    }
    assert dense.lost_updates is None  # The learning rate is zero.


class Twice(keras.Model):
    """Subclassed, with a shared layer, a dict of outputs and a mask."""

    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(6, name="shared")
        self.inner = keras.Sequential(
            [layers.Dense(4, name="first")], name="inner"
        )
        self.rnn = layers.GRU(2, name="rnn")

    def call(self, x):
        x = self.shared(self.shared(x))
        out = self.inner(x)
        return self.rnn(ops.reshape(out, (-1, 2, 2)))


def test_calls_are_distinct_and_in_order():
    model = Twice()
    model(X[:1])
    probing = probed(compiled(model))
    readings = probing.readings()
    activations = [p for p, r in readings.items() if "activation" in r.parts]
    (cell,) = [p for p in readings if p.startswith("rnn/")]
    assert activations == ["shared", "shared#1", "inner/first", "rnn", cell]
    # What it computes is what the layer returns.
    own, of_layer = readings[cell].parts, readings["rnn"].parts
    assert set(own) == {"activation", "gradient", "weight", "weight_gradient"}
    assert own["activation"].largest == of_layer["activation"].largest
    assert probing.probe.failures == {}


def trained(middle, jit, probing):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), *middle(), layers.Dense(2)])
    compiled(model, jit, keras.optimizers.AdamW(0.01))
    model.fit(X, Y, 8, epochs=4, shuffle=False, verbose=0, callbacks=probing)
    return numbers(model.weights)


@each_jit
def test_a_probed_run_is_the_same_run(jit):
    def middle():
        yield layers.Dense(16, activation="gelu")
        yield layers.LayerNormalization()
        yield layers.Dropout(0.3)
        yield layers.BatchNormalization()

    probing = Probing()
    watched, plain = trained(middle, jit, [probing]), trained(middle, jit, [])
    assert probing.readings()
    for weight, expected in zip(watched, plain, strict=True):
        if jit:
            # XLA may fuse, and so round, differently: an ulp of float32 in
            # each of 24 steps, against weights of about 1.
            np.testing.assert_allclose(weight, expected, 0, 24 * 2.0**-23)
        else:
            np.testing.assert_array_equal(weight, expected)


@only_tensorflow
def test_factors_that_tensorflow_merges_across_layers_are_rounded_apart():
    # Its graph optimizer makes one factor of gelu's 0.5 and of dropout's
    # 1 / 0.7, unless somebody looks at what is in between.
    def middle():
        yield layers.Dense(16, activation="gelu")
        yield layers.Dropout(0.3)

    watched = trained(middle, False, [Probing()])
    plain = trained(middle, False, [])
    for weight, expected in zip(watched, plain, strict=True):
        # A float16 ulp of gradients, 24 times a step of 0.01.
        np.testing.assert_allclose(weight, expected, 0, 24 * 0.01 * 2.0**-6)


class Squares(layers.Layer):
    def call(self, x):
        return x * x


@each_jit
def test_what_the_dtype_cannot_hold_is_not_finite(jit):
    model = keras.Sequential(
        [keras.Input((6,)), Squares(), Squares(), layers.Dense(2)]
    )
    x = np.full((48, 6), 16.0)
    found = probed(compiled(model, jit), x).readings()
    assert found["squares"].parts["activation"].largest == 256.0
    squares = found["squares_1"].parts["activation"]
    # 65536 is kept in float32 by XLA, and is none of float16's numbers.
    assert squares.nonfinite == squares.size
    assert squares.largest == 0.0


@each_jit
def test_small_numbers_are_counted_and_exponents_are_not(jit):
    model = keras.Sequential(
        [keras.Input((6,)), layers.Rescaling(2.0**-15), layers.Dense(2)]
    )
    row = [0.0, 1.0, 4.0, 2.0**-9, 2.0**-12, 3.0]
    model = compiled(model, jit)
    found = probed(model, np.tile(np.float32(row), (48, 1))).readings()
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


@not_torch
@each_jit
def test_several_steps_in_one_call(jit):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    probing = probed(compiled(model, jit, steps_per_execution=3))
    assert probing.readings()["dense"].parts["gradient"].size == 16
    assert model.optimizer.attempted_steps == 6


def test_a_skipped_step_says_what_was_not_finite():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    compiled(model, scale={"initial_scale": 2.0**30})
    dense = probed(model, X[:16], Y[:16]).readings()["dense"]
    assert dense.parts["gradient"].nonfinite
    assert dense.parts["weight_gradient"].nonfinite
    assert dense.parts["weight"].nonfinite == 0
    assert dense.lost_updates is None


def free_axes(images, words):
    """Layers over axes whose lengths nobody knows before a batch comes."""
    x = layers.Conv2D(2, 3, padding="same", name="convolution")(images)
    x = layers.GlobalAveragePooling2D()(x)
    y = layers.Embedding(5, 2, mask_zero=True, name="embedding")(words)
    y = layers.GlobalAveragePooling1D()(y)
    return layers.Dense(2, name="head")(layers.Concatenate()([x, y]))


SLOW = {False: [], True: [pytest.mark.slow]}


@pytest.mark.parametrize(
    ("jit", "steps"),
    [
        # Where both are possible XLA compiles each shape: 25 s on two cores.
        *(pytest.param(j, 1, marks=SLOW[j and len(JITS) > 1]) for j in JITS),
        *([(False, 2)] if BACKEND == "tensorflow" else ()),
    ],
)
def test_shapes_that_change_from_batch_to_batch(jit, steps, capfd):
    inputs = [keras.Input((None, None, 3)), keras.Input((None,), dtype="int32")]
    model = keras.Model(inputs, free_axes(*inputs))
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
    model = compiled(keras.Model(inputs, x), False, "sgd")
    model.optimizer.learning_rate = 0.0
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
        (lambda: 2.0**-40, None, 1.0),
        (lambda: 2.0**-4, 3, 0.0),
        (lambda: 2.0**-4, 4, None),
        (rate_of_zero, None, None),
    ],
)
def test_updates_are_lost_only_where_there_is_one(
    wrap, rate, accumulated, expected
):
    # The last of six steps: the second update of three gradients each, or
    # the second gradient of an update of four.
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2, None, False)])
    inner = keras.optimizers.SGD(
        rate(), gradient_accumulation_steps=accumulated
    )
    model.compile(wrap(inner), "mse", jit_compile=JIT)
    assert probed(model).readings()["dense"].lost_updates == expected


def test_bfloat16_is_its_own_measure():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
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
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(3, name="three"), layers.Dense(2)]
    )
    probing = probed(compiled(model))
    assert list(probing.probe.failures) == ["three"]
    assert "no threes" in probing.probe.failures["three"]
    assert "dense" in probing.readings()
    assert model.optimizer.attempted_steps == 6


@only_tensorflow
def test_repeated_rows_of_an_embedding():
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(5, 2),
            layers.Flatten(),
        ]
    )
    compiled(model, False)
    x = np.array([[0, 1, 1]] * 16)
    found = probed(model, x, np.zeros((16, 6))).readings()["embedding"]
    # The rows of the batch, not of the table.
    assert found.parts["weight_gradient"].size == 8 * 3 * 2
    assert found.parts["weight"].size == 10
    assert found.lost_updates is None


@only_tensorflow
@each_jit
def test_tables_of_other_lengths_whose_rows_are_as_many(jit):
    # As the tokens and the segments of BERT: (8, 3, 2) are used of either.
    ids = keras.Input((3,), batch_size=8, dtype="int32")
    tables = [layers.Embedding(n, 2, name=f"of_{n}") for n in (5, 7)]
    x = layers.Add()([table(ids) for table in tables])
    model = compiled(keras.Model(ids, layers.Flatten()(x)), jit)
    x = np.array([[0, 1, 1]] * 16)
    probing = probed(model, x, np.zeros((16, 6)))
    found = probing.readings()
    assert found["of_5"].parts["weight"].size == 10
    assert found["of_7"].parts["weight"].size == 14
    assert found["of_7"].parts["weight_gradient"].size == 8 * 3 * 2


@pytest.mark.slow
@only_tensorflow
def test_replicas_are_distinct():
    script = Path(__file__).parent / "distribution" / "mirrored_probe.py"
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.endswith("done\n")


@only_jax
def test_two_devices():
    devices = keras.distribution.list_devices()[:2]
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    try:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        found = probed(compiled(model)).readings()["dense"]
    finally:
        keras.distribution.set_distribution(None)
    assert found.parts["activation"].size == 8 * 2


class CustomStep(keras.Model):
    """Has a `train_step` of its own, as on its backend."""

    def call(self, x):
        return self.dense(x)

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2, name="dense")

    def train_step(self, *args):
        self.stepped = True
        return super().train_step(*args)


@each_jit
def test_a_train_step_of_ones_own(jit):
    model = CustomStep()
    model(X[:1])
    probing = probed(compiled(model, jit))
    assert "activation" in probing.readings()["dense"].parts
    assert model.stepped
    assert "train_step" not in vars(model)


def test_the_models_own_function_is_left_as_it_was():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    compiled(model)
    model.fit(X, Y, verbose=0)
    own, call = model.train_function, layers.Layer.__call__
    probe = Probe(model)
    assert model.train_function is own
    assert probe.train_function is not own
    assert layers.Layer.__call__ is call
    assert probe.read() == []
