"""Steps that are run dry, while optimizers are held, or only traced."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import (
    BACKEND,
    assert_identical,
    make_variables,
    numbers,
    rarely,
)
from zoo.own_step import OwnStep

import keras_mixprec as kmp
from keras_mixprec.backend.common import all_variables
from keras_mixprec.keras_internals import flat_layers, loss_ids
from keras_mixprec.numerics import tracing
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import (
    compiled_loss,
    compiled_step,
    dry_step,
)
from keras_mixprec.numerics.held_optimizers import Held
from keras_mixprec.numerics.tracing import path_of, trace_model


def compiled(*parts, shape=(2,), optimizer="adam", jit=False, dtype=None):
    """A built Sequential, its optimizer as well."""
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *parts])
    model.compile(optimizer, "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)
    return model


def tensors(*arrays):
    return tuple(ops.convert_to_tensor(a, "float32") for a in arrays)


def test_optimizers_that_skip_together_are_held():
    variables = make_variables((2,), (3,))
    before, steps = numbers(variables), []
    for variable in variables:
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam())
        optimizer.build([variable])
        gradient = ops.ones(variable.shape)
        steps.append((optimizer, [gradient], [variable]))
    first, second = (step[0] for step in steps)
    held = Held(lambda optimizer: 4.0)
    with held.holding():
        assert float(first.scale_loss(ops.ones(()))) == 4.0
        kmp.LossScaleOptimizer.apply_together(*steps)
    assert_identical(numbers(variables), before)
    losses, gradients, _ = held.taken()
    assert losses == [1.0]
    assert set(gradients) == {id(v) for v in variables}
    assert first.attempted_steps == 0
    kmp.LossScaleOptimizer.apply_together(*steps)
    assert first.attempted_steps == second.attempted_steps == 1


def test_a_dry_step_leaves_no_gradients_behind():
    model = compiled(layers.Dense(1))
    model.steps_taken = keras.Variable(0, dtype="int32", trainable=False)
    (x,) = tensors(np.ones((4, 2)))
    step = dry_step(model, (x, x[:, :1]), 2.0)
    assert len(step.gradients) == 2
    for variable in model.trainable_variables:
        assert getattr(variable.value, "grad", None) is None


def test_the_compiled_loss_is_that_of_the_step():
    model = compiled(layers.Dense(3), jit=BACKEND != "torch")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 2)), random.normal(size=(64, 3))
    for _ in range(2):
        before = numbers(model.variables)
        kernel, bias = numbers(model.weights)
        expected = np.mean((x @ kernel.astype("float64") + bias - y) ** 2)
        # float32 sums of 192 terms.
        loss = compiled_loss(model, tensors(x, y))
        assert loss == pytest.approx(expected, rel=1e-5)
        assert_identical(numbers(model.variables), before)
        model.train_on_batch(*tensors(x, y))
        random.shuffle(x)


def test_a_compiled_step_has_the_gradient_of_an_embedding():
    """Of which an uncompiled one has rows, on TensorFlow."""
    keras.config.set_dtype_policy("mixed_float16")
    tokens = layers.Embedding(5, 3, name="tokens")
    optimizer = kmp.LossScaleOptimizer("sgd")
    model = compiled(
        tokens, shape=(4,), optimizer=optimizer, jit=True, dtype="int32"
    )
    data = np.array([[0, 1, 1, 4]]), np.ones((1, 4, 3), "float32")
    data = tuple(map(ops.convert_to_tensor, data))
    steps = dry_step(model, data, 1.0), compiled_step(model, data, 1.0)
    found = [to_array(s.gradients[id(tokens.embeddings)]) for s in steps]
    assert found[0].shape == (5, 3)
    # Of two in float16, in whichever order they are added.
    np.testing.assert_allclose(*found, rtol=2**-9)


def test_the_cotangents_of_a_16_bit_step_are_those_that_arrive():
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(
        layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        layers.Rescaling(1 / 3),
        layers.Activation("linear", dtype="float32"),
        shape=(1,),
        optimizer="sgd",
    )
    x = np.arange(1, 5, dtype="float32")[:, None]
    step = dry_step(model, tensors(x, 0 * x), 2.0**8)
    first, *_ = step.calls
    narrow = np.float16
    predicted = (x.astype(narrow) * narrow(1 / 3)).astype("float32")
    arrives = (2.0**8 * 2 * predicted / 4).astype(narrow) * narrow(1 / 3)
    (cotangent,) = first.cotangents
    found = ops.convert_to_numpy(ops.cast(cotangent, "float32"))
    np.testing.assert_array_equal(found, arrives.astype("float32"))


def test_a_layer_is_given_the_cotangents_of_the_exact_step():
    dense = [layers.Dense(8, "tanh", name=name) for name in "abc"]
    model = compiled(*dense, shape=(8,), optimizer="sgd")
    data = tensors(*np.random.default_rng(0).normal(size=(2, 4, 8)))
    exact = dry_step(model, data, 1.0)
    # As if the layers after `a` had lost their gradients.
    for call in exact.calls[1:]:
        call.cotangents = [c * 0 for c in call.cotangents]
    known = {call.name: call for call in exact.calls}
    step = dry_step(model, data, 4.0, known)
    kept, *lost = (to_array(step.gradients[id(d.kernel)]) for d in dense)
    expected = to_array(exact.gradients[id(dense[0].kernel)])
    np.testing.assert_allclose(np.abs(kept), 4 * np.abs(expected), rtol=1e-5)
    assert not np.any(lost)


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


def around(layer):
    """A model in mixed_float16 of which a layer is the first."""
    policy = "mixed_float16"
    inputs = keras.Input((6,))
    layer.dtype_policy = keras.DTypePolicy(policy)
    x = layers.BatchNormalization(dtype=policy, name="norm")(layer(inputs))
    return keras.Model(inputs, layers.Dense(2, dtype=policy, name="head")(x))


def samples():
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    return 100 * x


def in_layer(trace, path):
    return [op for op in trace.operations if path_of(op) == path]


def test_operations_have_common_names_dtypes_layers_and_ranges():
    x = samples()
    trace = trace_model(around(Norm(name="own")), x)
    found = [op for op in in_layer(trace, "own") if op.name != "cast"]
    names = [op.name for op in found]
    assert names == ["square", "sum", "div", "sqrt", "add", "div"]
    square, total, mean, _, add, _ = found
    # JAX adds up in float32.
    assert {square.output.dtype, mean.output.dtype} == {"float16"}
    assert total.reduced == 6
    assert total.output.reference.dtype == "float32"
    assert {path_of(op) for op in trace.operations} >= {"own", "norm", "head"}
    # Constants are known as they were written, ranges as those of float32.
    written = add.inputs[1].reference.constant
    assert written == pytest.approx(1e-12, rel=1e-6)
    exact = np.square(x.astype("float64"))
    known = square.output.reference.range
    assert known.high == pytest.approx(exact.max(), rel=1e-4)
    assert known.least == pytest.approx(exact.min(), rel=1e-4)
    assert known.deviation == pytest.approx(exact.std(), rel=1e-4)
    known = total.output.reference.range
    assert known.high == pytest.approx(exact.sum(-1).max(), rel=1e-4)


@pytest.mark.parametrize("data", [rarely(()), (samples(),)])
def test_nothing_is_changed(data):
    model = around(Noisy(name="noisy"))
    model.compile("adam", loss="mse", jit_compile=False)
    model.fit(samples(), np.zeros((5, 2)), verbose=0)

    def state():
        parts = list(flat_layers(model))
        losses = [set(loss_ids(part)) for part in parts]
        return losses, [part.dtype_policy for part in parts]

    before = numbers(all_variables(model)), state()
    trace = trace_model(model, *data)
    assert_identical(numbers(all_variables(model)), before[0])
    assert state() == before[1]
    # Random numbers are no constants.
    logs = [op for op in in_layer(trace, "noisy") if op.name == "log"]
    assert [op.inputs[0].constant for op in logs] == [None]


def test_errors_of_16_bits_alone_and_of_the_model():
    def raising(x):
        if x.dtype != ops.ones((), "float32").dtype:
            raise TypeError("only float32")
        return x

    layer = layers.Lambda(lambda x: x)
    model = around(layer)
    layer.function = raising
    trace = trace_model(model)
    assert "only float32" in str(trace.error)
    assert trace.untraced is None
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
    trace = trace_model(around(Loop(name="loop")))
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
    kmp.apply_policy(model, "mixed_float16", rules=[])
    return model


def described(trace):
    """Every operation, with its values numbered in the order met."""
    met = {}

    def describe(value):
        number = met.setdefault(id(value), len(met))
        exact = value.reference.constant if value.reference else None
        return number, value.dtype, value.shape, value.constant, exact

    return [
        (op.name, op.scope, op.reduced, op.exponent)
        + tuple(map(describe, [*op.inputs, *op.outputs]))
        for op in trace.operations
    ]


def test_a_layer_like_another_is_not_called_again(monkeypatch):
    model, called = repeats(), []
    for kind in layers.LeakyReLU, layers.Dense:

        def seen(self, *args, _call=kind.call, **kwargs):
            called.append(self.name)
            return _call(self, *args, **kwargs)

        monkeypatch.setattr(kind, "call", seen)
    found = described(trace_model(model))
    # The first layer alone is given float32. JAX traces all in no time.
    again = {"leaky1", "dense2"} & set(called)
    assert again == ({"leaky1", "dense2"} if BACKEND == "jax" else set())
    assert {"leaky2", "own1", "own2"} <= set(called)
    # It has the operations that it would have.
    monkeypatch.setattr(tracing, "call_key", lambda *_: None)
    assert found == described(trace_model(model))
