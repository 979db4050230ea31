"""The operations of a model's own calls, listed without computing them."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from zoo.own_step import OwnStep

import keras_mixprec
from keras_mixprec.backend.common import all_variables
from keras_mixprec.keras_internals import flat_layers, loss_ids
from keras_mixprec.numerics import tracing
from keras_mixprec.numerics.tracing import path_of, trace_model


class Norm(layers.Layer):
    def call(self, x):
        mean = ops.sum(ops.square(x), axis=-1, keepdims=True) / x.shape[-1]
        return x / (ops.sqrt(mean) + 1e-12)


class Noisy(layers.Layer):
    """Changes all that a call can change."""

    def build(self, input_shape):
        self.seed_generator = keras.random.SeedGenerator(1)
        self.inner = layers.Dropout(0.5, dtype=self.dtype_policy)
        self.count = self.add_weight(shape=(), trainable=False, autocast=False)

    def call(self, x, training=False):
        self.count.assign(self.count + 1)
        self.add_loss(ops.cast(ops.mean(x), "float32"))
        noise = keras.random.uniform(
            ops.shape(x), dtype=x.dtype, seed=self.seed_generator
        )
        return self.inner(x, training=training) + ops.log(noise + 1e-12)


def model_of(layer, policy="mixed_float16"):
    inputs = keras.Input((6,))
    layer.dtype_policy = keras.DTypePolicy(policy)
    x = layers.BatchNormalization(dtype=policy, name="norm")(layer(inputs))
    return keras.Model(inputs, layers.Dense(2, dtype=policy, name="head")(x))


def samples():
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    return 100 * x


def in_layer(trace, path):
    return [op for op in trace.operations if path_of(op) == path]


def test_operations_have_common_names_dtypes_and_layers():
    trace = trace_model(model_of(Norm(name="own")))
    found = [op for op in in_layer(trace, "own") if op.name != "cast"]
    names = [op.name for op in found]
    assert names == ["square", "sum", "div", "sqrt", "add", "div"]
    # JAX adds up in float32.
    assert {found[0].output.dtype, found[2].output.dtype} == {"float16"}
    assert found[1].reduced == 6
    assert found[1].output.reference.dtype == "float32"
    assert {path_of(op) for op in trace.operations} >= {"own", "norm", "head"}


def test_constants_are_known_as_they_were_written():
    trace = trace_model(model_of(Norm(name="own")))
    add = next(op for op in in_layer(trace, "own") if op.name == "add")
    written = add.inputs[1].reference.constant
    assert written == pytest.approx(1e-12, rel=1e-6)


def test_ranges_are_those_of_float32():
    x = samples()
    trace = trace_model(model_of(Norm(name="own")), x)
    square, total = (
        next(op for op in in_layer(trace, "own") if op.name == name)
        for name in ("square", "sum")
    )
    exact = np.square(x.astype("float64"))
    known = square.output.reference.range
    assert known.high == pytest.approx(exact.max(), rel=1e-4)
    assert known.least == pytest.approx(exact.min(), rel=1e-4)
    assert known.deviation == pytest.approx(exact.std(), rel=1e-4)
    known = total.output.reference.range
    assert known.high == pytest.approx(exact.sum(-1).max(), rel=1e-4)


@pytest.mark.parametrize("data", [(), (samples(),)], ids=["shapes", "data"])
def test_nothing_is_changed(data):
    model = model_of(Noisy(name="noisy"))
    model.compile("adam", loss="mse")
    model.fit(samples(), np.zeros((5, 2)), verbose=0)
    before = [ops.convert_to_numpy(v.value) for v in all_variables(model)]
    losses = [set(loss_ids(part)) for part in flat_layers(model)]
    policies = [part.dtype_policy for part in flat_layers(model)]
    assert trace_model(model, *data).operations
    for value, variable in zip(before, all_variables(model), strict=True):
        np.testing.assert_array_equal(value, ops.convert_to_numpy(variable))
    assert losses == [loss_ids(part) for part in flat_layers(model)]
    assert policies == [part.dtype_policy for part in flat_layers(model)]


def test_random_numbers_are_no_constants():
    trace = trace_model(model_of(Noisy(name="noisy")))
    logs = [op for op in in_layer(trace, "noisy") if op.name == "log"]
    assert [op.inputs[0].constant for op in logs] == [None]


def test_an_error_of_16_bits_alone_is_reported():
    def raising(x):
        if x.dtype != keras.ops.ones((), "float32").dtype:
            raise TypeError("only float32")
        return x

    layer = layers.Lambda(lambda x: x)
    model = model_of(layer)
    layer.function = raising
    trace = trace_model(model)
    assert "only float32" in str(trace.error)
    assert trace.untraced is None


def test_an_error_in_float32_is_not_of_the_precision():
    layer = layers.Lambda(lambda x: x)
    model = model_of(layer)
    layer.function = lambda x: 1 / 0
    trace = trace_model(model)
    assert trace.error is None
    assert isinstance(trace.untraced, ZeroDivisionError)


class Loop(layers.Layer):
    def call(self, x):
        return ops.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, ops.exp(y)), (0, x)
        )[1]


def test_the_inside_of_loops_and_recurrent_layers_is_listed():
    trace = trace_model(model_of(Loop(name="loop")))
    assert "exp" in [op.name for op in in_layer(trace, "loop")]
    inputs = keras.Input((5, 3))
    rnn = layers.SimpleRNN(4, activation="exponential", name="rnn")
    trace = trace_model(keras.Model(inputs, rnn(inputs)))
    assert "exp" in [op.name for op in in_layer(trace, "rnn")]


class Step(OwnStep):
    """A train step with a loss by hand."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2, name="dense")

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x, y):
        loss = ops.mean(ops.exp(self(x) - ops.cast(y, self.compute_dtype)))
        return loss, {"step_loss": loss}


def test_a_train_step_is_traced_up_to_its_loss():
    keras.config.set_dtype_policy("mixed_float16")
    model = Step()
    model(samples())
    model.compile("sgd", loss=None, jit_compile=False)
    data = samples(), np.ones((5, 2), "float32")
    alone = trace_model(model, data[0])
    assert "exp" not in [op.name for op in alone.operations]
    trace = trace_model(model, *data)
    assert trace.error is None
    assert trace.untraced is None
    names = [op.name for op in in_layer(trace, "")]
    assert [n for n in names if n in ("sub", "exp")] == ["sub", "exp"]


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(12, shape[-1]))

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return ops.exp(x + self.table[: ops.shape(x)[1]])


def test_as_many_positions_are_traced_as_the_model_has():
    inputs = keras.Input((None, 8))
    own = Positions(name="own", dtype="mixed_float16")
    trace = trace_model(keras.Model(inputs, own(inputs)))
    assert trace.untraced is None
    (exp,) = [op for op in trace.operations if op.name == "exp"]
    assert exp.output.shape == (32, 8, 8)


class Plain(layers.Layer):
    def call(self, x):
        return ops.square(x)


def repeats():
    """Pairs of layers of Keras that differ, and some that do not."""
    inputs = x = keras.Input((8,))
    slopes = [0.1, 0.1, 1e-9]
    for index, slope in enumerate(slopes):
        x = layers.Dense(8, name=f"dense{index}")(x)
        x = layers.LeakyReLU(slope, name=f"leaky{index}")(x)
        norm = layers.BatchNormalization(name=f"norm{index}", epsilon=slope)
        x = norm(x, training=index != 1)
        x = layers.Dense(8, lambda x: x * slope, name=f"own{index}")(x)  # noqa: B023
        x = Plain(name=f"plain{index}")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    keras_mixprec.apply_policy(model, "mixed_float16", rules=[])
    return model


def described(trace):
    """Every operation, with its values numbered in the order met."""
    numbers = {}

    def describe(value):
        number = numbers.setdefault(id(value), len(numbers))
        exact = value.reference.constant if value.reference else None
        return number, value.dtype, value.shape, value.constant, exact

    return [
        (op.name, op.scope, op.reduced, op.exponent)
        + tuple(map(describe, [*op.inputs, *op.outputs]))
        for op in trace.operations
    ]


def test_calls_like_another_have_the_operations_that_they_would_have(
    monkeypatch,
):
    model = repeats()
    found = described(trace_model(model))
    monkeypatch.setattr(tracing, "call_key", lambda *_: None)
    assert found == described(trace_model(model))


@pytest.mark.parametrize("kind", [layers.LeakyReLU, layers.Dense])
def test_a_layer_like_another_is_not_called_again(kind, monkeypatch):
    model, called, call = repeats(), [], kind.call

    def seen(self, *args, **kwargs):
        called.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(kind, "call", seen)
    trace_model(model)
    if keras.backend.backend() == "jax":  # Which traces them in no time.
        assert {"leaky1", "dense2"} & set(called)
    else:
        # The first layer alone is given float32.
        assert not {"leaky1", "dense2"} & set(called)
    assert {"leaky2", "own1", "own2"} & set(called)
