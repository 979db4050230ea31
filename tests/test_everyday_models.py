"""Everyday code around a fault: regularizers, `Sequential` blocks."""

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import JITS, each_jit, fit, good, monitor

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 4)).astype("float32")
Y = X[:, :1].copy()


def found(verdicts):
    return [(v.layer, v.kind) for v in verdicts]


@each_jit
@pytest.mark.parametrize("regularizer", ["l1", "l2", "orthogonal"])
def test_a_weight_regularizer_leaves_the_diagnosis_as_it_is(regularizer, jit):
    if regularizer == "orthogonal":
        regularizer = keras.regularizers.OrthogonalRegularizer()
    dense = layers.Dense(4, kernel_regularizer=regularizer, name="dense")
    norm = layers.UnitNormalization(name="norm")
    head = layers.Dense(1, dtype="float32", name="head")
    model = keras.Sequential([keras.Input((4,)), dense, norm, head])
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("head")])
    model.compile(kmp.LossScaleOptimizer("adam"), loss="mse", jit_compile=jit)
    assert found(kmp.diagnose(model, 1e3 * X, Y)) == [
        ("norm", "forward_overflow")
    ]


class Norm(layers.Layer):
    def call(self, x):
        squares = keras.ops.sum(x * x, axis=-1, keepdims=True)
        return x / keras.ops.sqrt(squares + 1e-3)


@each_jit
def test_the_tuner_repairs_beside_a_weight_regularizer(jit):
    keras.config.set_dtype_policy("mixed_float16")
    dense = layers.Dense(4, kernel_regularizer="l2", name="dense")
    head = layers.Dense(1, name="head", dtype="float32", bias_regularizer="l1")
    model = keras.Sequential(
        [keras.Input((4,)), dense, Norm(name="norm"), head]
    )
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    history = model.fit(
        1e3 * X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[tuner]
    ).history
    demoted = {p for p, q in tuner.plan.items() if q == "float32"}
    assert demoted == {"norm", "head"}
    assert [change["step"] for change in tuner.history] == [0]
    assert np.isfinite(history["loss"]).all()


def test_a_dry_step_has_the_gradient_of_the_regularizer():
    from keras_mixprec.numerics.dry_step import exact_step

    dense = layers.Dense(1, use_bias=False, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), dense])
    model.compile("sgd", loss="mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    data = tuple(keras.ops.convert_to_tensor(part) for part in (X, Y))
    step = exact_step(model, data)
    kernel = keras.ops.convert_to_numpy(dense.kernel.value).astype("float64")
    error = X @ kernel - Y
    true = 2 * X.T.astype("float64") @ error / len(X) + 2 * 0.01 * kernel
    (gradient,) = step.gradients.values()
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(gradient), true, rtol=1e-5, atol=1e-6
    )
    assert step.loss == pytest.approx(
        np.mean(error**2) + 0.01 * np.sum(kernel**2), rel=1e-5
    )


def block(*more):
    """A `Sequential` that gets its input layer when it is built, of float16."""
    keras.config.set_dtype_policy("mixed_float16")
    down = layers.Rescaling(1e-3, name="down")
    model = keras.Sequential([down, *more], name="block")
    model.build((None, 4))
    return model


def nested():
    model_input = keras.Input((4,))
    x = layers.Rescaling(1.0, dtype="float32", name="raw")(model_input)
    head = layers.Dense(1, dtype="float32", name="head")
    return keras.Model(model_input, head(block(layers.Dense(4))(x)))


def alone():
    return block(layers.Dense(1, dtype="float32", name="head"))


@pytest.mark.parametrize("build", [alone, nested])
def test_a_sequential_without_an_input_computes_in_its_policy(build):
    model = build()
    large = np.full((2, 4), 1e6, "float32")
    assert not np.isfinite(model.predict(large, verbose=0)).any()
    kmp.apply_policy(model, "float32")
    assert np.isfinite(model.predict(large, verbose=0)).all()


@pytest.mark.parametrize("build", [alone, nested])
def test_a_sequential_without_an_input_is_repaired(build):
    model = build()
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.Adam(0.05)),
        loss="mse",
        jit_compile=False,
    )
    tuner = kmp.PrecisionTuner(verbose=0)
    large = 1e5 * X
    assert kmp.diagnose(model, large, Y)[0].layer.endswith("down")
    history = model.fit(
        large, Y, batch_size=16, epochs=3, verbose=0, callbacks=[tuner]
    )
    assert tuner.history[0]["kind"] == "demote"
    assert np.isfinite(history.history["loss"]).all()
    assert model.optimizer.skipped_steps < 4


def test_a_diagnosis_leaves_the_input_of_a_sequential_as_it_was():
    model = alone()
    model.compile(kmp.LossScaleOptimizer("adam"), loss="mse")
    before = model.inputs[0].dtype, model.input_dtype
    kmp.diagnose(model, X, Y)
    assert (model.inputs[0].dtype, model.input_dtype) == before
    assert before == ("float16", "float16")


# Keras wraps no optimizer then, the tuner does as training begins.
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
def test_a_frozen_model(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.trainable = False
    model.compile(
        "sgd", "mse", auto_scale_loss=False, jit_compile=next(iter(JITS))
    )
    before = model.get_weights()
    callbacks = [monitor(tmp_path), kmp.PrecisionTuner(verbose=0)]
    history = fit(model, good(4), callbacks, epochs=2)
    assert np.isfinite(history["loss"]).all()
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
