"""Steps that raise in 16 bits and run in float32."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import BACKEND, each_jit
from zoo.own_step import FunctionalOwnStep, OwnStep

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
LABELS = (np.arange(16) % 2).astype("float32")[:, None]

# `a @ b` of unequal dtypes: JAX widens one of them by itself.
refuses_mixes = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX computes in the wider dtype"
)


def head(activation=None):
    return layers.Dense(1, activation, dtype="float32", name="head")


def compiled(inputs, outputs, jit, loss="mse"):
    model = keras.Model(inputs, outputs)
    rules = [kmp.PrecisionRule("head")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss=loss, jit_compile=jit)
    return model


def found(verdicts):
    return [(v.layer, v.kind) for v in verdicts]


class Tokens(layers.Layer):
    """Token ids come as float32 where `keras.Input` has no dtype."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(4096, 4, name="embedding")

    def build(self, shape):
        self.embedding.build(shape)

    def call(self, ids):
        return self.embedding(ids)


def on_tokens(jit):
    inputs = keras.Input((4,))
    x = layers.GlobalAveragePooling1D()(Tokens(name="tokens")(inputs))
    return compiled(inputs, head()(x), jit)


@pytest.mark.skipif(BACKEND != "torch", reason="Only torch's loss refuses.")
@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_the_cast_that_made_the_nan_is_named(gain):
    """Also where float32's loss is saturated in the row that overflows."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, "relu", use_bias=False, name="first"),
            layers.Dense(1, "sigmoid", name="out"),
        ]
    )
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile("sgd", "binary_crossentropy", jit_compile=False)
    model.layers[0].set_weights([np.eye(4)])
    out = np.array([[gain], [2 * gain], [-gain], [-3 * gain]])
    model.layers[1].set_weights([out, np.zeros(1)])
    x = X.copy()
    x[5] = 1e6
    x[5, 2] = 1e5
    first = kmp.diagnose(model, x, LABELS)[0]
    assert (first.kind, first.layer) == ("cast_overflow", "first")
    assert first.numbers["largest_input"] == 1e6
    assert "call" not in first.advice


@each_jit
@pytest.mark.parametrize("first", [2049, 4032])
def test_token_ids_that_a_cast_rounds_are_named(first, jit):
    ids = np.arange(first, first + 64).reshape(16, 4)
    (verdict,) = kmp.diagnose(on_tokens(jit), ids, LABELS)
    assert found([verdict]) == [("tokens", "precision_loss")]
    assert verdict.numbers["rounded_integers"] == 32
    assert "keras.Input(..., dtype='int32')" in verdict.advice


@each_jit
def test_token_ids_are_repaired(jit):
    model, ids = on_tokens(jit), np.arange(4032, 4096).reshape(16, 4)
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(ids, LABELS, epochs=2, verbose=0, callbacks=[tuner])
    assert tuner.plan["tokens"] == "float32"
    assert tuner.plan["tokens/embedding"] == "mixed_float16"


@each_jit
def test_nan_that_a_loss_refuses_is_traced_to_its_layer(jit):
    inputs = keras.Input((4,))
    x = layers.UnitNormalization(name="norm")(inputs)
    model = compiled(
        inputs, head("sigmoid")(x), jit, loss="binary_crossentropy"
    )
    tuner = kmp.PrecisionTuner(verbose=0)
    assert found(kmp.diagnose(model, 1e-5 * X, LABELS)) == [
        ("norm", "underflow")
    ]
    model.fit(1e-5 * X, LABELS, verbose=0, callbacks=[tuner])
    assert tuner.plan["norm"] == "float32"


class Turn(layers.Layer):
    """Multiplies by a constant that no autocast reaches."""

    def call(self, x):
        return x @ ops.eye(4, dtype="float32")


@refuses_mixes
@each_jit
def test_a_mix_of_dtypes_in_a_layer_is_named_with_what_mends_it(jit):
    inputs = keras.Input((4,))
    turned = Turn(name="turn")(layers.Dense(4)(inputs))
    model = compiled(inputs, head()(layers.Dense(4)(turned)), jit)
    set_policy(model)
    (verdict,) = kmp.diagnose(model, X, LABELS)
    assert found([verdict]) == found(kmp.diagnose(model, X))
    assert found([verdict]) == [("turn", "unsupported")]
    assert verdict.numbers["code"].startswith("return x @ ops.eye(4")
    assert "PrecisionRule('turn')" in verdict.advice
    assert "keras.ops.cast" in verdict.advice
    rules = [kmp.PrecisionRule(name) for name in ("turn", "head")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    assert not kmp.diagnose(model, X, LABELS)
    model.fit(X, LABELS, verbose=0)


def set_policy(model):
    """As Keras sets it when a model is built under a global policy."""
    for layer in model.layers:
        if layer.name != "head":
            layer.dtype_policy = "mixed_float16"


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight, **kwargs):
        error = y_pred @ ops.eye(4, dtype="float32")
        return ops.mean(ops.square(error))


@refuses_mixes
@each_jit
def test_a_mix_of_dtypes_outside_of_layers_is_named_and_repaired(jit):
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, name="hidden")(inputs)
    outputs = layers.Dense(4, name="last")(hidden)
    model = OwnLoss(inputs, outputs)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=jit)
    (verdict,) = kmp.diagnose(model, X, X)
    assert found([verdict]) == [("last", "unsupported")]
    assert verdict.numbers["code"].startswith("error = y_pred @ ops.eye")
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(X, X, verbose=0, callbacks=[tuner])
    assert tuner.plan["last"] == "float32"
    assert tuner.plan["hidden"] == "mixed_float16"


class Latent(layers.Layer):
    """Draws, and adds a loss in its own dtype, as a guide's VAE does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(0)

    def call(self, x):
        self.add_loss(0.5 * ops.mean(ops.square(x)))
        noise = keras.random.normal(
            ops.shape(x), dtype=x.dtype, seed=self.seed_generator
        )
        return x + noise


class Vae(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(8, activation="relu", name="encoder")
        self.latent = Latent(name="latent")
        self.decoder = layers.Dense(4, activation="sigmoid", name="decoder")

    def call(self, x):
        return self.decoder(self.latent(self.encoder(x)))


# Keras' trainer adds up losses of two dtypes, which TensorFlow alone refuses.
@each_jit
def test_a_loss_that_a_layer_adds_in_16_bits_is_repaired(jit):
    refused = BACKEND == "tensorflow"
    model = Vae()
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    tuner = kmp.PrecisionTuner(verbose=0)
    history = model.fit(X, X, epochs=2, verbose=0, callbacks=[tuner]).history
    demoted = {p for p, policy in tuner.plan.items() if policy == "float32"}
    assert demoted == ({"latent"} if refused else set())
    assert np.isfinite(history["loss"]).all()
    assert not kmp.diagnose(model, X, X)


class FirstOutputLoss(OwnLoss):
    def compute_loss(self, x, y, y_pred, sample_weight, **kwargs):
        return super().compute_loss(x, y, y_pred[0], sample_weight)


@refuses_mixes
@each_jit
def test_the_layer_that_is_mixed_is_found_behind_others(jit):
    inputs = keras.Input((4,))
    first = [keras.Input((4,)), layers.Dense(4, name="last")]
    y = x = keras.Sequential(first, name="generator")(inputs)
    for _ in range(6):
        x = layers.Dense(4)(x)
    model = FirstOutputLoss(inputs, [y, x])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=jit)
    assert found(kmp.diagnose(model, X, [X, X])) == [
        ("generator/last", "unsupported")
    ]


class Residual(layers.Layer):
    """One of its parts is a normalization, which a rule widens."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4, name="dense")
        self.turn = layers.Dense(4, use_bias=False, name="turn")

    def build(self, shape):
        self.dense.build(shape)
        self.turn.build(shape)

    def call(self, x):
        return ops.swapaxes(self.dense(x), 0, 1) @ self.turn(x)


@refuses_mixes
def test_a_rule_for_a_part_of_a_layer_makes_no_mix_of_dtypes():
    inputs = keras.Input((4,))
    x = Residual(name="residual")(layers.Dense(4, name="before")(inputs))
    model = keras.Model(inputs, head()(x))
    rules = [kmp.PrecisionRule("residual/turn")]
    plan = kmp.apply_policy(model, "mixed_float16", rules=rules)
    assert plan["before"] == "mixed_float16"
    assert plan["residual/dense"] == plan["residual/turn"] == "float32"
    assert "mixes dtypes" in plan.reasons["residual"]
    assert model.predict(X, verbose=0).shape == (4, 1)


class Picky(keras.metrics.Mean):
    """Refuses float16, as a top-k accuracy does on TensorFlow."""

    def update_state(self, y, outputs, sample_weight=None):
        if keras.backend.standardize_dtype(outputs.dtype) == "float16":
            raise TypeError("expected float32")
        super().update_state(outputs)


@each_jit
def test_a_metric_that_refuses_16_bits_is_traced_to_its_layer(jit):
    inputs = keras.Input((4,))
    outputs = layers.Dense(1, name="out")(layers.Dense(4)(inputs))
    model = keras.Model(inputs, outputs)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    optimizer = kmp.LossScaleOptimizer("adam")
    model.compile(optimizer, "mse", metrics=[Picky()], jit_compile=jit)
    assert found(kmp.diagnose(model, X, LABELS)) == [("out", "unsupported")]
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(X, LABELS, verbose=0, callbacks=[tuner])
    assert tuner.plan["out"] == "float32"


@each_jit
@pytest.mark.parametrize("in_sequential", [True, False])
def test_a_loss_that_refuses_what_a_sequential_casts(in_sequential, jit):
    # Built under the policy: it casts its input itself.
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    x = layers.Rescaling(1.0, name="first")(inputs)
    block = [layers.LayerNormalization(name="norm"), layers.Dense(4)]
    if in_sequential:
        block = [keras.Sequential(block, name="block")]
    for layer in block:
        x = layer(x)
    outputs = layers.Dense(1, "sigmoid", dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        kmp.LossScaleOptimizer("adam"), "binary_crossentropy", jit_compile=jit
    )
    large = np.where(np.arange(16)[:, None] == 3, 1e5, X)
    # By itself the normalization takes float32 as it comes.
    block = {("block/norm", "cast_overflow")} if in_sequential else set()
    named = {("first", "cast_overflow")} | block
    assert set(found(kmp.diagnose(model, large, LABELS))) == named


class Commitment(layers.Layer):
    def call(self, x):
        self.add_loss(1e-6 * ops.mean(ops.square(ops.sum(x, axis=-1))))
        return x


class WithAddedLosses(FunctionalOwnStep):
    """Adds what layers have added to a loss of the dtype of its outputs."""

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        squares = ops.square(outputs - ops.cast(y, outputs.dtype))
        loss = ops.mean(squares) + self.losses[0]
        return loss, {"loss": loss}


def test_a_repair_that_the_train_step_mixes_with_16_bits_takes_both():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    x = Commitment(name="commitment")(layers.Dense(64, name="first")(inputs))
    model = WithAddedLosses(inputs, layers.Dense(1, name="out")(x))
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=False)
    x = 100 * X
    named = found(kmp.diagnose(model, x, LABELS))
    assert named[0] == ("commitment", "forward_overflow")
    # TensorFlow adds no float32 to a float16.
    mixed = [("out", "unsupported")] * (BACKEND == "tensorflow")
    assert named[1:] == mixed
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(x, LABELS, verbose=0, callbacks=[tuner])
    assert tuner.plan["first"] == "mixed_float16"
    assert np.isfinite(model.evaluate(x, LABELS, verbose=0))


class Flow(OwnStep):
    """Multiplies its input by what its layers say, and then by float32."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, name="first")
        self.last = layers.Dense(4, name="last")

    def call(self, x, training=False):
        return x * self.last(self.first(x))

    def loss_of(self, x, y):
        turned = self(x, training=True) @ ops.eye(4, dtype="float32")
        loss = ops.mean(ops.square(turned))
        return loss, {"loss": loss}


@refuses_mixes
def test_code_outside_of_layers_is_demoted_with_what_it_computes_with():
    keras.config.set_dtype_policy("mixed_float16")
    model = Flow()
    model(X)
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=False)
    (verdict,) = kmp.diagnose(model, X, LABELS)
    # torch multiplies float16 by float32.
    named = "<model>" if BACKEND == "tensorflow" else "last"
    assert found([verdict]) == [(named, "unsupported")]
    assert ("`train_step`" in verdict.advice) == (named == "<model>")
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(X, LABELS, verbose=0, callbacks=[tuner])
    assert tuner.plan["first"] == "mixed_float16"
    assert tuner.plan["last"] == "float32"


def test_an_overflow_of_integers_is_no_rounding_of_them():
    metres = np.arange(3001, 3065).reshape(16, 4)
    inputs = keras.Input((4,))
    x = layers.Rescaling(1.0, name="metres")(inputs)
    crossed = x * layers.Dense(4, kernel_initializer="ones", name="cross")(x)
    crossed = layers.BatchNormalization()(crossed)
    model = compiled(inputs, head()(crossed), jit=False)
    verdicts = kmp.diagnose(model, metres, LABELS)
    assert "forward_overflow" in [v.kind for v in verdicts]
    assert not any("integers" in v.advice for v in verdicts)


@each_jit
def test_two_layers_that_add_losses_are_found_among_many(jit):
    """TensorFlow alone does not add up losses of several dtypes."""
    inputs = x = keras.Input((8,))
    for n in range(6):
        adds = {"activity_regularizer": "l2"} if n in (1, 4) else {}
        x = layers.Dense(8, "relu", name=f"dense_{n}", **adds)(x)
    model = keras.Model(inputs, layers.Dense(1, name="out")(x))
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    verdicts = [v for v in kmp.diagnose(model, x, x[:, :1]) if v.layer]
    found = [v.layer for v in verdicts]
    assert all("`activity_regularizer`" in v.advice for v in verdicts)
    mixes = BACKEND == "tensorflow"
    assert found == (["dense_1", "dense_4"] if mixes else [])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others pool float16")
@pytest.mark.parametrize("jit", [False, True])
def test_what_single_operations_alone_refuse_is_no_fault_under_xla(jit):
    keras.config.set_dtype_policy("mixed_float16")
    pool = layers.MaxPooling3D(2, name="pool")
    ends = [layers.GlobalAveragePooling3D(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4, 4, 4, 1)), pool, *ends])
    optimizer = kmp.LossScaleOptimizer("adam")
    model.compile(optimizer, "mse", jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(8, 4, 4, 4, 1))
    found = [v.layer for v in kmp.diagnose(model, x, x[:, 0, 0, 0]) if v.layer]
    assert found == ([] if jit else ["pool"])


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
    keras.config.set_dtype_policy("mixed_float16")
    parts = layers.Dense(4), HandsVariable(), layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(8, 4))
    assert [v for v in kmp.diagnose(model, x, x[:, :1]) if v.layer] == []
