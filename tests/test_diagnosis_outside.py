"""Faults outside of the model's layers.

They are in its own `call`, loss or step, in layers that it does not hold, in
losses that layers add, and in statistics that they keep.
"""

import keras
import numpy as np
import pytest
from diagnosis_models import (
    LOGITS,
    Adds,
    Direction,
    Own,
    compiled,
    demoted,
    found,
    in_float16,
    model_of,
    tuned,
)
from keras import layers, ops
from monitor_models import BACKEND, each_jit, monitor, only_tensorflow
from zoo.own_step import FunctionalOwnStep
from zoo.parts import Parts, dense

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 32)
HEAD = dense(3, name="head")


def named(model, x=X, y=Y, loss=LOGITS, **scaling):
    """Returns all findings except `scale_search`."""
    compiled(model, loss, **scaling)
    verdicts = kmp.diagnose(model, x, y)
    said = [(v.layer, v.kind, v.direction) for v in verdicts]
    return [name for name in said if name[1] != "scale_search"]


def with_head(*parts, **arguments):
    return model_of(*parts, HEAD, **{"wide": ["head"]} | arguments)


class Between(Parts):
    """Normalizes by hand what its first layer returns."""

    def call(self, x):
        x = self.first(x)
        size = ops.sum(ops.square(300 * x), axis=-1, keepdims=True)
        return self.second(300 * x / ops.sqrt(size + 1e-3))


def between(name=None):
    model = Between(first=dense(8), second=dense(8))
    model.name = name or model.name
    return model


@pytest.mark.long
@each_jit
@pytest.mark.parametrize("inner", [False, True])
def test_a_models_own_call_is_named_by_the_layer_that_it_follows(
    inner, jit, tmp_path
):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = between()
    if inner:
        model = model_of(between("inner"), dense(8), policy="mixed_float16")
    path = "inner/first" if inner else "first"
    (verdict,) = kmp.diagnose(compiled(model, jit=jit), X, X)
    assert (verdict.layer, verdict.kind) == (path, "forward_overflow")
    assert verdict.numbers["in_call_of"] == ("inner" if inner else "<model>")
    assert f"PrecisionRule('{path}')" in verdict.advice
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuner = tuned(model, X, X, epochs=4, callbacks=[watcher])
    assert demoted(tuner) == {path}
    assert watcher.summary.headline["state"] == "repaired"


# Layers that a step calls in 16 bits and that the model does not hold.


class FeatureLoss(keras.losses.Loss):
    """With a network of its own, made under the global policy."""

    def __init__(self, dtype=None):
        super().__init__()
        square = layers.Lambda(ops.square, name="square", dtype=dtype)
        self.net = keras.Sequential([keras.Input((8,)), square], name="net")

    def call(self, y_true, y_pred):
        off = self.net(y_true) - self.net(y_pred)
        return ops.mean(ops.cast(off, "float32") ** 2, axis=-1) / 1e9


class Calls(Parts):
    """Calls a layer that it does not know of."""

    def call(self, x):
        return self.head(self.beside[0](x))


def of_loss(jit, **arguments):
    model = model_of(dense(8, dtype="float32"), policy="mixed_float16")
    return compiled(model, FeatureLoss(**arguments), jit=jit), X, 1000 + X


def of_call(jit, **arguments):
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = Calls(head=dense(8, dtype="float32"))
    beside = Direction(name="direction", **arguments)
    model.beside = [lambda x: beside(x)]
    return compiled(model, jit=jit), 600 * X, X


@pytest.mark.long
@each_jit
@pytest.mark.parametrize(
    ("build", "kind", "advice"),
    [
        (of_loss, "forward_overflow", "in float16"),
        (of_call, "precision_loss", "'direction'"),
    ],
)
def test_a_layer_beside_the_model(build, kind, advice, jit, tmp_path):
    model, x, y = build(jit)
    (verdict,) = kmp.diagnose(model, x, y)
    assert (verdict.layer, verdict.kind) == (None, kind)
    assert advice in verdict.advice
    # A sound one is not blamed.
    assert found(build(jit)[0], X, X) == []
    assert found(build(jit, dtype="float32")[0], x, y) == []
    watcher = monitor(tmp_path)
    tuned(model, x, y, batch_size=4, epochs=3, callbacks=[watcher])
    kinds = {v.kind for v in watcher.verdicts}
    assert kind in kinds
    assert "divergence" not in kinds


@each_jit
@pytest.mark.parametrize("by_floatx", [True, False])
def test_a_loss_in_float16(jit, by_floatx):
    floatx = "float16" if by_floatx else "float32"
    try:
        keras.config.set_floatx(floatx)
        model = model_of(dense(1, dtype="float32"), policy="mixed_float16")
        dtype = None if by_floatx else "float16"
        loss = keras.losses.MeanSquaredError(dtype=dtype)
        compiled(model, loss, "sgd", jit)
        y = np.full((32, 1), 400.0, "float32")
        (verdict,) = kmp.diagnose(model, X, y)
        now = keras.config.floatx(), loss.dtype
    finally:
        keras.config.set_floatx("float32")
    assert (verdict.layer, verdict.kind) == (None, "forward_overflow")
    assert "set_floatx('float32')" in verdict.advice
    assert now == (floatx, "float16")


# Code that mixes dtypes, which TensorFlow alone refuses.


def product(y, prediction):
    import tensorflow as tf

    return ops.mean(tf.multiply(y, prediction))


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return product(y, y_pred)


class OwnCall(Parts):
    def call(self, x):
        import tensorflow as tf

        return self.out(tf.multiply(self.hidden(x), ops.ones((4,), "float32")))


def mixing(where):
    keras.config.set_dtype_policy("mixed_float16")
    model = OwnCall(hidden=dense(4), out=dense(1))
    if where != "call":
        kind = OwnLoss if where == "compute_loss" else keras.Model
        model = model_of(
            dense(1, name="out"), policy="mixed_float16", kind=kind
        )
    losses = {"loss": lambda y, p: product(y, ops.cast(p, "float16"))}
    metrics = [product] if where == "metric" else []
    loss = losses.get(where, "mse")
    model.compile("adam", loss, metrics=metrics, jit_compile=False)
    return model


@only_tensorflow
@pytest.mark.parametrize(
    ("where", "layer"),
    [("metric", "out"), ("call", "hidden"), ("compute_loss", "out")]
    + [("loss", None)],
)
def test_the_line_and_its_dtypes_are_named(tmp_path, where, layer):
    this = "test_diagnosis_outside.py:"
    data = X, np.ones((32, 1), "float32")
    (verdict,) = kmp.diagnose(mixing(where), *data)
    assert (verdict.layer, verdict.kind) == (layer, "unsupported")
    assert sorted(verdict.numbers["mixed_dtypes"]) == ["float16", "float32"]
    assert verdict.numbers["code"].startswith(this)
    # Below the exception of `fit`, and after it.
    model = mixing(where)
    with pytest.raises(TypeError) as raised:
        model.fit(*data, verbose=0, callbacks=[kmp.MixPrecMonitor(tmp_path)])
    assert this in raised.value.__notes__[0]
    assert [kind for _, kind in found(model, *data)] == ["unsupported"]


@only_tensorflow
def test_checks_of_numerics_are_no_fault_of_a_layer():
    import tensorflow as tf

    model = with_head(Own(ops.square, name="square"))
    tf.debugging.enable_check_numerics()
    try:
        said = found(compiled(model), 1e3 * X, X[:, :3])
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.constant(1.0) / 0.0
    finally:
        tf.debugging.disable_check_numerics()
    assert said == [("square", "forward_overflow")]


def test_callbacks_run_in_a_loop_around_a_model_without_compile(tmp_path):
    model = in_float16(keras.Sequential([keras.Input((4,)), layers.Dense(1)]))
    optimizer = kmp.LossScaleOptimizer("adam")
    optimizer.build(model.trainable_variables)
    gradients = [ops.ones(v.shape) for v in model.trainable_variables]
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuner = kmp.PrecisionTuner(verbose=0)
    callbacks = keras.callbacks.CallbackList([watcher, tuner], model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for step in range(6):
        callbacks.on_train_batch_begin(step)
        optimizer.apply(gradients, model.trainable_variables)
        callbacks.on_train_batch_end(step, {"loss": 1.0})
    callbacks.on_epoch_end(0, {"loss": 1.0})
    callbacks.on_train_end()
    (run,) = watcher.report.to_dict().values()
    assert run["last_step"] == 6
    assert watcher.verdicts == []


# Losses that layers add, and their gradients.


def spread(x):
    """Returns the distances of rows, with the diagonal masked."""
    apart = ops.expand_dims(x, 0) - ops.expand_dims(x, 1)
    # 1e-12 is 0 in float16, and the derivative of the root infinite.
    distance = ops.sqrt(ops.sum(apart * apart, -1) + 1e-12)
    return -0.01 * ops.cast(ops.mean(distance), "float32")


def penalized(penalty):
    return dense(8, activity_regularizer=penalty, name="adds")


@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        lambda: [dense(8), Adds(spread, name="adds")],
        # Which its layer adds as a loss, here a finite one.
        lambda: [penalized(spread)],
    ],
)
def test_the_gradients_of_an_added_loss(parts):
    # The kind differs by backend: JAX multiplies by the reciprocal of the root,
    # so no operand is 0 when the gradient becomes infinite.
    [(path, _, direction)] = named(with_head(*parts()), 4 * X)
    assert (path, direction) == ("adds", "backward")


@pytest.mark.long
def test_a_sound_added_loss_is_nobodys_fault():
    adds = Adds(lambda x: 0.01 * ops.mean(ops.square(x)))
    assert named(with_head(dense(8), adds)) == []
    # TensorFlow does not add the float16 that Keras' own returns.
    refused = [("adds", "unsupported", None)] * (BACKEND == "tensorflow")
    assert named(with_head(penalized("l2")), 4 * X) == refused


@pytest.mark.long
@pytest.mark.parametrize("factor", [1, 1000])
def test_a_regularizer_that_overflows_is_found(factor):
    large = dense(64, kernel_initializer="ones", activity_regularizer="l2")
    model = compiled(model_of(large, HEAD))
    x = np.full((8, 8), 100.0 * factor, "float32")
    verdict = kmp.diagnose(model, x, np.ones((8, 3)))[0]
    assert verdict.kind in ("forward_overflow", "cast_overflow")
    assert verdict.layer == "dense"


# Statistics that layers keep.

STANDS = ("keeps", "precision_loss", "update")


class Keeps(layers.Layer):
    """A moving average by hand, or the number of steps from a start."""

    def __init__(self, momentum=None, start=0.0, autocast=False):
        super().__init__(name="keeps")
        self.momentum, self.start, self.casts = momentum, start, autocast

    def build(self, input_shape):
        shape = input_shape[-1:] if self.momentum else ()
        start = keras.initializers.Constant(self.start)
        kept = {"trainable": False, "autocast": self.casts}
        self.own = self.add_weight(shape, start, **kept)

    def call(self, x):
        new = now = ops.cast(self.own, x.dtype)
        if self.momentum:
            new = self.momentum * now + (1 - self.momentum) * ops.mean(x, 0)
        self.own.assign(new if self.momentum else now + 1)
        return x


@pytest.mark.parametrize(
    ("policy", "settings", "stands"),
    [
        ("mixed_float16", {"momentum": 0.9}, False),
        ("mixed_float16", {"momentum": 0.999}, True),
        ("mixed_bfloat16", {"momentum": 0.5}, False),
        # 0.99 is 0.98828 there: it resolves a seventh below the mean.
        ("mixed_bfloat16", {"momentum": 0.99}, True),
        # float16 counts to 2048, bfloat16 to 256.
        ("mixed_float16", {"start": 1000.0}, False),
        ("mixed_float16", {"start": 2048.0}, True),
        ("mixed_bfloat16", {"start": 100.0}, False),
        ("mixed_bfloat16", {"start": 256.0}, True),
        # Which torch does not assign.
        ("mixed_float16", {"autocast": True}, BACKEND == "torch"),
        ("mixed_float16", None, False),
        ("mixed_bfloat16", None, False),
    ],
)
def test_what_stands_still_is_named(policy, settings, stands):
    norm = layers.BatchNormalization(name="keeps")
    keeps = norm if settings is None else Keeps(**settings)
    model = with_head(dense(8), keeps)
    in_float16(model, ["head"], policy)
    before = [np.array(v) for v in keeps.non_trainable_variables]
    assert named(model, X + 2) == ([STANDS] if stands else [])
    for variable, value in zip(
        keeps.non_trainable_variables, before, strict=True
    ):
        np.testing.assert_array_equal(variable, value)
    if settings == {"autocast": True}:
        model.fit(X, Y, len(X), verbose=0)
        assert (float(keeps.own) == 1) != stands


# Keras puts a product in place of the kernel, which on torch is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_vector_that_is_kept_from_step_to_step():
    # Keras assigns it in the call of a float16 layer, which torch loses.
    inner = layers.Dense(8)
    normalized = layers.SpectralNormalization(inner, name="keeps")
    lost = [STANDS] * (BACKEND == "torch")
    assert named(with_head(normalized)) == lost


@only_tensorflow  # Elsewhere no loss takes the logits of an output.
@pytest.mark.parametrize(("size", "layers"), [(1, []), (30, ["out"])])
def test_a_loss_that_loses_the_logits_of_a_16_bit_softmax(size, layers):
    # In float32 it is computed from logits, of a 16-bit output from
    # probabilities, which are cut off at 1e-7.
    out = dense(3, "softmax", name="out")
    model = model_of(dense(16), out, policy="mixed_float16")
    loss = "sparse_categorical_crossentropy"
    said = named(model, size * X, loss=loss, initial_scale=1.0)
    assert [layer for layer, *_ in said] == layers


class OfPairs(FunctionalOwnStep):
    """A model with one loss for two rows; its input is not the batch."""

    def loss_of(self, pairs, y):
        return ops.mean(ops.square(self(pairs[0]) - self(pairs[1])))


@pytest.mark.parametrize("scale", [1, 400])
def test_a_step_that_takes_the_batch_apart(scale):
    pairs = scale * RANDOM.normal(size=(2, 32, 8)).astype("float32")
    model = with_head(Direction(name="direction"), kind=OfPairs)
    fault = [("direction", "forward_overflow", "forward")]
    assert named(model, pairs, np.zeros(2)) == fault * (scale > 1)
