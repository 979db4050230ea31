"""`diagnose(model, x)` without targets: what `predict` does, forward only."""

import keras
import numpy as np
import pytest
from diagnosis_models import Block, Overflowing
from keras import layers, ops
from monitor_models import each_jit

import keras_mixprec as kmp

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def found(verdicts):
    return [(v.layer, v.kind, v.direction) for v in verdicts]


def in_float16(model):
    kmp.apply_policy(model, "mixed_float16", rules=[])
    return model


def functional():
    inputs = keras.Input((8,))
    x = Overflowing(name="bad")(layers.Dense(8)(inputs))
    return in_float16(keras.Model(inputs, layers.Dense(3, name="head")(x)))


def sequential():
    parts = [layers.Dense(8), Overflowing(name="bad"), layers.Dense(3)]
    return in_float16(keras.Sequential(parts))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(name="block")

    def call(self, x, training=False):
        return self.block(x["features"], training=training)


@pytest.mark.parametrize("build", [functional, sequential])
@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_model_compiled_or_not(build, loss):
    model = build()
    if loss:
        model.compile(kmp.LossScaleOptimizer("adam"), loss, jit_compile=False)
    model.jit_compile = False
    (verdict,) = kmp.diagnose(model, X)
    assert found([verdict]) == [("bad", "forward_overflow", "forward")]
    assert "PrecisionRule('bad')" in verdict.advice
    assert "loss" not in str(verdict)
    assert model.compiled == bool(loss)


@each_jit
def test_a_subclassed_model_that_is_not_built(jit):
    keras.config.set_dtype_policy("mixed_float16")
    model = Subclassed()
    model.jit_compile = jit
    (verdict,) = kmp.diagnose(model, {"features": 1e3 * X})
    assert found([verdict]) == [("block/bad", "forward_overflow", "forward")]
    assert verdict.compiled == jit


def test_it_is_inference():
    """In training the batch's own mean and variance are small."""
    norm = layers.BatchNormalization(name="norm")
    parts = [keras.Input((8,)), norm, layers.Rescaling(1.0, name="next")]
    model = keras.Sequential(parts)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile("sgd", "mse")
    norm.moving_variance.assign(np.full(8, 1e-10))
    exact = X / np.sqrt(np.float64(1e-10) + norm.epsilon) * 2100
    assert np.abs(exact).max() > 65504
    trained = kmp.diagnose(model, 2100 * X, X)
    assert [v.layer for v in trained if v.layer] == []
    assert [v.layer for v in kmp.diagnose(model, 2100 * X)][:1] == ["norm"]


def everything(model):
    return [ops.convert_to_numpy(v.value).copy() for v in model.variables]


@pytest.mark.parametrize("build", [functional, sequential])
def test_nothing_is_changed(build):
    model = build()
    model.predict(X, verbose=0)
    plan, before = kmp.PrecisionPlan.from_model(model), everything(model)
    random = ops.convert_to_numpy(keras.random.normal((4,), seed=3))
    outputs = model.predict(0.01 * X, verbose=0)
    kmp.diagnose(model, X)
    assert kmp.PrecisionPlan.from_model(model) == plan
    for a, b in zip(before, everything(model), strict=True):
        np.testing.assert_array_equal(a, b)
    again = ops.convert_to_numpy(keras.random.normal((4,), seed=3))
    np.testing.assert_array_equal(random, again)
    np.testing.assert_array_equal(outputs, model.predict(0.01 * X, verbose=0))


# What is no fault.


class Masked(layers.Layer):
    """Scores of which half are masked, as attention does it."""

    def __init__(self, masked, **kwargs):
        super().__init__(**kwargs)
        self.masked = masked

    def call(self, x):
        return ops.where(ops.arange(8) % 2 == 0, x, self.masked)


def masked_softmax(masked):
    return [Masked(masked, name="masked"), layers.Softmax()]


HEALTHY = {
    "dense": lambda: [layers.Dense(32, "gelu"), layers.Dense(4)],
    "norms": lambda: [layers.BatchNormalization(), layers.LayerNormalization()],
    "masked": lambda: masked_softmax(-np.inf),
    "masked by a number": lambda: masked_softmax(-1e9),
    "returns what is masked": lambda: [Masked(-1e9)],
    "attends": lambda: [
        layers.Reshape((4, 2)),
        layers.Dense(8),
        layers.Identity(),
        layers.EinsumDense("bsd,de->bse", (None, 8)),
        layers.GlobalMaxPooling1D(),
    ],
    "drops": lambda: [layers.Dropout(0.5), layers.GaussianNoise(1.0)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model(name):
    model = keras.Sequential([keras.Input((8,)), *HEALTHY[name]()])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    assert kmp.diagnose(model, X) == []


def test_a_mask_is_not_blamed_for_what_is_wrong_elsewhere():
    parts = [*masked_softmax(-1e9), layers.Rescaling(1e3), Overflowing()]
    model = keras.Sequential([keras.Input((8,)), *parts])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.jit_compile = False
    verdicts = kmp.diagnose(model, X)
    assert found(verdicts) == [("overflowing", "forward_overflow", "forward")]


def test_what_float32_fails_at_is_no_matter_of_precision():
    parts = [layers.Lambda(ops.log, name="log"), layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *parts])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    (verdict,) = kmp.diagnose(model, X)
    count = 3 * int((X < 0).any(axis=1).sum())
    assert found([verdict]) == [(None, "divergence", None)]
    assert verdict.numbers == {"nan_in_float32": count}
    assert "learning rate" not in verdict.advice


def test_bad_rows_and_lost_weights():
    x = X.copy()
    x[3, 2] = np.nan
    model = functional()
    (verdict,) = kmp.diagnose(model, x)
    assert verdict.kind == "bad_data"
    assert verdict.numbers == {"rows_of_x": [3]}
    model.layers[1].bias.assign(np.full(8, np.nan))
    assert [v.kind for v in kmp.diagnose(model, X)] == ["weights_lost"]


# Which models are diagnosed as `fit` runs them.


class AddsLoss(layers.Layer):
    """As the divergence of an autoencoder: it overflows only as a loss."""

    def call(self, x):
        self.add_loss(ops.cast(ops.mean(ops.square(1e3 * x)), "float32"))
        return x


def autoencoder():
    parts = [layers.Dense(8), AddsLoss(name="adds"), layers.Dense(8)]
    model = keras.Sequential([keras.Input((8,)), *parts])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    return model


def test_a_loss_that_needs_no_targets_is_diagnosed_as_fit_runs_it():
    model = autoencoder()
    assert kmp.diagnose(model, X) == []
    model.compile(kmp.LossScaleOptimizer("sgd"), jit_compile=False)
    assert found(kmp.diagnose(model, X))[0][:2] == ("adds", "forward_overflow")


class NeedsTargets(keras.Sequential):
    def train_step(self, data, *state):
        raise TypeError("This needs targets.")


def test_a_train_step_that_needs_targets():
    parts = [keras.Input((8,)), Overflowing(name="bad"), layers.Dense(8)]
    model = in_float16(NeedsTargets(parts))
    model.compile("sgd", "mse", jit_compile=False)
    assert [v.layer for v in kmp.diagnose(model, X)] == ["bad"]
    with pytest.raises(TypeError, match="This needs targets"):
        kmp.diagnose(model, X, X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, X), "`model` must be compiled if there are targets"),
        ((X, None, np.ones(16)), "`model` must be compiled if there are"),
        ((None,), "`x` must be one batch"),
        ((X[:0],), "`x` must be one batch"),
        ((["a", "b"],), "`x` must be one batch"),
        ((X[:, :5],), "expected|incompatible"),
    ],
)
def test_wrong_calls(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmp.diagnose(functional(), *arguments)
    with pytest.raises(TypeError, match="`model` must be a `keras.Model`"):
        kmp.diagnose("model", *arguments)
