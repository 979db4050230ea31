"""Steps that raise in 16 bits and run in float32."""

import keras
import numpy as np
import pytest
from diagnosis_models import (
    Own,
    blamed,
    compiled,
    demoted,
    found,
    in_float16,
    model_of,
    tuned,
)
from keras import layers, ops
from monitor_models import BACKEND, each_jit, not_jax, only_torch
from zoo.own_step import FunctionalOwnStep, OwnStep
from zoo.parts import dense, embedding

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
LABELS = (np.arange(16) % 2).astype("float32")[:, None]
ADAM = keras.optimizers.Adam
TENSORFLOW = BACKEND == "tensorflow"

# JAX widens one operand of `a @ b` with unequal dtypes.
refuses_mixes = not_jax


def model(*parts, activation=None, wide=("head",), **arguments):
    """A model of layers and a head, in float32 but if nothing is."""
    head = dense(1, activation, name="head")
    return model_of(*parts, head, shape=(4,), wide=wide, **arguments)


class Holding(layers.Layer):
    """A layer with parts inside it, which it computes with."""

    def __init__(self, function, name, **parts):
        super().__init__(name=name)
        self.function = function
        for part, make in parts.items():
            setattr(self, part, make(name=part))

    def build(self, shape):
        for layer in self._flatten_layers(include_self=False):
            layer.build(shape)

    def call(self, x):
        return self.function(self, x)


def on_tokens(jit):
    """Token ids come as float32 where `keras.Input` has no dtype."""
    words = embedding(4096, 4)
    tokens = Holding(lambda self, ids: self.words(ids), "tokens", words=words)
    mean = layers.GlobalAveragePooling1D()
    return compiled(model(tokens, mean), "mse", ADAM(0.01), jit)


@only_torch  # Whose loss alone refuses.
@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_the_cast_that_made_the_nan_is_named(gain):
    """Also where float32's loss is saturated in the row that overflows."""
    first = dense(4, "relu", use_bias=False, name="first")
    out = model_of(first, dense(1, "sigmoid", name="out"), shape=(4,))
    out.compile("sgd", "binary_crossentropy", jit_compile=False)
    last = np.array([[gain], [2 * gain], [-gain], [-3 * gain]])
    out.set_weights([np.eye(4), last, np.zeros(1)])
    x = X.copy()
    x[5] = 1e6
    x[5, 2] = 1e5
    verdict = kmp.diagnose(out, x, LABELS)[0]
    assert (verdict.layer, verdict.kind) == ("first", "cast_overflow")
    assert verdict.numbers["largest_input"] == 1e6
    assert "call" not in verdict.advice


@pytest.mark.long
@each_jit
@pytest.mark.parametrize("first", [2049, 4032])
def test_token_ids_that_a_cast_rounds_are_named(first, jit):
    ids = np.arange(first, first + 64).reshape(16, 4)
    (verdict,) = kmp.diagnose(on_tokens(jit), ids, LABELS)
    assert (verdict.layer, verdict.kind) == ("tokens", "precision_loss")
    assert verdict.numbers["rounded_integers"] == 32
    assert "dtype='int32'" in verdict.advice


@pytest.mark.long
def test_an_overflow_of_integers_is_no_rounding_of_them():
    metres = np.arange(3001, 3065).reshape(16, 4)
    inputs = keras.Input((4,))
    x = layers.Rescaling(1.0, name="metres")(inputs)
    crossed = x * layers.Dense(4, kernel_initializer="ones", name="cross")(x)
    crossed = layers.BatchNormalization()(crossed)
    squares = keras.Model(inputs, layers.Dense(1, name="head")(crossed))
    verdicts = kmp.diagnose(
        compiled(in_float16(squares, ["head"])), metres, LABELS
    )
    assert "forward_overflow" in [v.kind for v in verdicts]
    assert not any("integers" in v.advice for v in verdicts)


def eye(x):
    """Multiplies by a constant that no autocast reaches."""
    return x @ ops.eye(4, dtype="float32")


@refuses_mixes
@each_jit
def test_a_mix_of_dtypes_in_a_layer_is_named_with_what_mends_it(jit):
    turn = Own(eye, name="turn")
    mixed = compiled(model(dense(4), turn, dense(4)), jit=jit)
    # As Keras sets it when a model is built under a global policy.
    turn.dtype_policy = "mixed_float16"
    (verdict,) = kmp.diagnose(mixed, X, LABELS)
    assert (verdict.layer, verdict.kind) == ("turn", "unsupported")
    assert found(mixed, X) == [("turn", "unsupported")]
    assert "return x @ ops.eye(4" in verdict.numbers["code"]
    assert "PrecisionRule('turn')" in verdict.advice
    assert "keras.ops.cast" in verdict.advice
    in_float16(mixed, ["turn", "head"])
    assert blamed(mixed, X, LABELS) == []
    mixed.fit(X, LABELS, verbose=0)


# Findings, and the layers that the tuner demotes.


def token_ids(jit):
    return on_tokens(jit), np.arange(4032, 4096).reshape(16, 4), LABELS


def refused_nan(jit):
    """NaN that a loss refuses is traced to its layer."""
    norm = layers.UnitNormalization(name="norm")
    small = model(norm, activation="sigmoid")
    return compiled(small, "binary_crossentropy", jit=jit), 1e-5 * X, LABELS


class OwnLoss(keras.Model):
    """Mixes dtypes outside of layers."""

    def compute_loss(self, x, y, y_pred, sample_weight, **kwargs):
        y_pred = y_pred[0] if isinstance(y_pred, list) else y_pred
        error = y_pred @ ops.eye(4, dtype="float32")
        return ops.mean(ops.square(error))


def mixed_loss(jit):
    hidden, last = dense(4, name="hidden"), dense(4, name="last")
    mixed = model_of(hidden, last, shape=(4,), kind=OwnLoss)
    return compiled(mixed, None, jit=jit), X, X


def mixed_far_behind(jit):
    inputs = keras.Input((4,))
    first = [keras.Input((4,)), layers.Dense(4, name="last")]
    y = x = keras.Sequential(first, name="generator")(inputs)
    for _ in range(6):
        x = layers.Dense(4)(x)
    mixed = in_float16(OwnLoss(inputs, [y, x]))
    return compiled(mixed, None, jit=jit), X, [X, X]


class Picky(keras.metrics.Mean):
    """Refuses float16, as a top-k accuracy does on TensorFlow."""

    def update_state(self, y, outputs, sample_weight=None):
        if keras.backend.standardize_dtype(outputs.dtype) == "float16":
            raise TypeError("expected float32")
        super().update_state(outputs)


def picky(jit):
    plain = model(dense(4), wide=())
    optimizer = kmp.LossScaleOptimizer("adam")
    plain.compile(optimizer, "mse", metrics=[Picky()], jit_compile=jit)
    return plain, X, LABELS


class WithAddedLosses(FunctionalOwnStep):
    """Adds what layers have added to a loss of the dtype of its outputs."""

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        squares = ops.square(outputs - ops.cast(y, outputs.dtype))
        loss = ops.mean(squares) + self.losses[0]
        return loss, {"loss": loss}


class Commitment(layers.Layer):
    def call(self, x):
        self.add_loss(1e-6 * ops.mean(ops.square(ops.sum(x, axis=-1))))
        return x


def repair_mixed(jit):
    """The train step mixes a repaired layer's loss with 16 bits."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = dense(64, name="first"), Commitment(name="commitment")
    own = model(*parts, policy="mixed_float16", kind=WithAddedLosses)
    return compiled(own, None, jit=jit), 100 * X, LABELS


class Flow(OwnStep):
    """Multiplies its input by what its layers say, and then by float32."""

    def call(self, x, training=False):
        return x * self.last(self.first(x))

    def loss_of(self, x, y):
        turned = self(x, training=True) @ ops.eye(4, dtype="float32")
        return ops.mean(ops.square(turned))


def flow(jit):
    keras.config.set_dtype_policy("mixed_float16")
    own = Flow(first=dense(4), last=dense(4))
    own(X)
    return compiled(own, None, jit=jit), X, LABELS


def two_penalties(jit):
    """TensorFlow alone does not add up losses of several dtypes."""
    penalty = {"activity_regularizer": "l2"}
    parts = [
        dense(8, "relu", name=f"dense_{n}", **penalty if n in (1, 4) else {})
        for n in range(6)
    ]
    return compiled(model(*parts, wide=()), jit=jit), X, LABELS


RAISED = {
    token_ids: (
        [("tokens", "precision_loss")],
        {"tokens", "global_average_pooling1d"},
    ),
    refused_nan: ([("norm", "underflow")], {"norm"}),
    mixed_loss: ([("last", "unsupported")], {"last"}),
    mixed_far_behind: ([("generator/last", "unsupported")], None),
    picky: ([("head", "unsupported")], {"head"}),
    repair_mixed: (
        # TensorFlow adds no float32 to a float16.
        [("commitment", "forward_overflow")]
        + [("head", "unsupported")] * TENSORFLOW,
        {"commitment"},
    ),
    # torch multiplies the model's float32 input by what `last` returns.
    flow: ([("<model>", "unsupported")], {"last"} if TENSORFLOW else set()),
    two_penalties: (
        [("dense_1", "unsupported"), ("dense_4", "unsupported")],
        {"dense_1", "dense_4"},
    ),
}
if BACKEND == "jax":
    for build in (mixed_loss, mixed_far_behind, flow):
        del RAISED[build]
if not TENSORFLOW:  # Keras' trainer adds up losses of two dtypes.
    RAISED[two_penalties] = [], set()


@pytest.mark.long
@each_jit
@pytest.mark.parametrize("build", RAISED)
def test_what_raises_is_found_and_repaired(build, jit):
    expected, narrow = RAISED[build]
    mixed, *data = build(jit)
    assert found(mixed, *data) == expected
    if narrow is not None:
        tuner = tuned(mixed, *data, epochs=2)
        assert demoted(tuner) | {"head"} == narrow | {"head"}
        last = [values[-1] for values in mixed.history.history.values()]
        assert np.isfinite(last).all()


@refuses_mixes
def test_a_rule_for_a_part_of_a_layer_makes_no_mix_of_dtypes():
    def call(self, x):
        return ops.swapaxes(self.dense(x), 0, 1) @ self.turn(x)

    turn = dense(4, use_bias=False)
    residual = Holding(call, "residual", dense=dense(4), turn=turn)
    mixed = model(dense(4, name="before"), residual, wide=["residual/turn"])
    plan = kmp.PrecisionPlan.from_model(mixed)
    assert plan["before"] == "mixed_float16"
    assert plan["residual/dense"] == plan["residual/turn"] == "float32"
    rules = [kmp.PrecisionRule("residual/turn")]
    plan = kmp.apply_policy(mixed, "mixed_float16", rules=rules)
    assert "mixes dtypes" in plan.reasons["residual"]
    assert mixed.predict(X, verbose=0).shape == (4, 1)


@pytest.mark.long
@each_jit
@pytest.mark.parametrize("in_sequential", [True, False])
def test_a_loss_that_refuses_what_a_sequential_casts(in_sequential, jit):
    # Built under the policy: it casts its input itself.
    keras.config.set_dtype_policy("mixed_float16")
    block = [layers.LayerNormalization(name="norm"), layers.Dense(4)]
    if in_sequential:
        block = [keras.Sequential(block, name="block")]
    parts = layers.Rescaling(1.0, name="first"), *block
    head = layers.Dense(1, "sigmoid", dtype="float32")
    casts = model_of(*parts, head, shape=(4,), policy="mixed_float16")
    compiled(casts, "binary_crossentropy", jit=jit)
    large = np.where(np.arange(16)[:, None] == 3, 1e5, X)
    # Outside of a `Sequential` the normalization accepts float32.
    named = ["first", "block/norm"][: 1 + in_sequential]
    expected = {(layer, "cast_overflow") for layer in named}
    assert set(found(casts, large, LABELS)) == expected


@pytest.mark.skipif(not TENSORFLOW, reason="others pool float16")
@pytest.mark.parametrize("jit", [False, True])
def test_what_single_operations_alone_refuse_is_no_fault_under_xla(jit):
    keras.config.set_dtype_policy("mixed_float16")
    pool = layers.MaxPooling3D(2, name="pool"), layers.GlobalAveragePooling3D()
    shape = {"shape": (4, 4, 4, 1), "policy": "mixed_float16"}
    pools = compiled(model_of(*pool, dense(1), **shape), jit=jit)
    x = RANDOM.normal(size=(8, 4, 4, 4, 1))
    assert blamed(pools, x, x[:, 0, 0, 0]) == ([] if jit else ["pool"])


class TakesMask(layers.Layer):
    def call(self, x, mask):
        return x + ops.cast(mask, x.dtype)


class HandsVariable(layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=shape[-1:], trainable=False)
        self.inner = TakesMask()

    def call(self, x):
        return self.inner(x, self.shift)


@each_jit
def test_a_variable_handed_to_a_layer_is_a_tensor(jit):
    parts = dense(4), HandsVariable, dense(1)
    hands = model_of(*parts, shape=(4,), policy="mixed_float16")
    assert blamed(compiled(hands, jit=jit), X, LABELS) == []
