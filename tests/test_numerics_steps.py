"""Steps that are run dry, or only traced."""

import keras
import numpy as np
from keras import layers, ops
from zoo.own_step import OwnStep

import keras_mixprec as kmp
from keras_mixprec.numerics import tracing
from keras_mixprec.numerics.dry_step import dry_step
from keras_mixprec.numerics.tracing import path_of, trace_model


def compiled(*parts, shape=(2,), optimizer="adam", jit=False, dtype=None):
    """A built Sequential, its optimizer as well."""
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *parts])
    model.compile(optimizer, "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)
    return model


def tensors(*arrays):
    return tuple(ops.convert_to_tensor(a, "float32") for a in arrays)


def test_a_dry_step_leaves_no_gradients_behind():
    model = compiled(layers.Dense(1))
    model.steps_taken = keras.Variable(0, dtype="int32", trainable=False)
    (x,) = tensors(np.ones((4, 2)))
    step = dry_step(model, (x, x[:, :1]), 2.0)
    assert len(step.gradients) == 2
    for variable in model.trainable_variables:
        assert getattr(variable.value, "grad", None) is None


def samples():
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    return 100 * x


def in_layer(trace, path):
    return [op for op in trace.operations if path_of(op) == path]


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


def test_a_layer_like_another_has_its_own_operations(monkeypatch):
    model = repeats()
    found = described(trace_model(model))
    monkeypatch.setattr(tracing, "call_key", lambda *_: None)
    assert found == described(trace_model(model))
