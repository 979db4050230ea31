"""Layers that run in float16 one by one, but that XLA refuses to compile."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, monitor, told
from tuner_models import tuner

import keras_mixprec as kmp

pytestmark = pytest.mark.skipif(
    BACKEND == "torch", reason="it compiles nothing"
)


def upsampling():
    """Bilinear, on TensorFlow: tensorflow/tensorflow#81273."""
    x = inputs = keras.Input((4, 4, 2))
    x = keras.layers.Conv2D(2, 1)(x)
    x = keras.layers.Add(name="add")([keras.layers.BatchNormalization()(x), x])
    up = keras.layers.UpSampling2D(2, interpolation="bilinear", name="up")(x)
    x = keras.layers.Conv2D(2, 1)(up)
    return keras.Model(inputs, keras.layers.Add(name="end")([x, up])), (8, 8, 2)


def attention():
    """An attention that JAX refuses on CPUs: float16 summed in float32."""
    inputs = keras.Input((4, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    x = attention(inputs, inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(x)), (4, 1)


def refused():
    """The compiled model, batches and the layers that may be named."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    on_jax = BACKEND == "jax"
    model, target = attention() if on_jax else upsampling()
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3))
    model.compile(optimizer, "mse", jit_compile=True)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(8, *model.input_shape[1:]))
    named = {"add", "up"} if not on_jax else {"attention/query"}
    return model, (x, numbers.normal(size=(8, *target))), named


def fit(model, data, *callbacks):
    return model.fit(
        *data, 2, epochs=2, verbose=0, callbacks=callbacks
    ).history["loss"]


def test_the_exception_names_a_layer(tmp_path):
    model, data, named = refused()
    before = model.get_weights()
    with pytest.raises(Exception) as caught:
        fit(model, data, monitor(tmp_path, probe_every=9))
    note = caught.value.__notes__[-1]  # JAX has one of its own.
    assert "unsupported in " in note
    assert any(f"{name!r}" in note for name in named)
    (event,) = told(tmp_path, "verdict")
    assert event["layer"] in named
    if BACKEND != "jax":  # Keras drops all values there.
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_tuner_repairs_it_and_no_batch_is_lost(tmp_path):
    model, data, named = refused()
    loss = fit(model, data, monitor(tmp_path, probe_every=9), tuner())
    demoted = {
        layer.path
        for layer in model._flatten_layers()
        if layer.dtype_policy.name == "float32"
    }
    assert any(path.endswith(tuple(named)) for path in demoted)
    assert np.isfinite(loss).all()
    assert model.optimizer.attempted_steps == 8
    plain, _, _ = refused()
    kmp.PrecisionPlan.from_model(model).apply(plain)
    assert fit(plain, data) == pytest.approx(loss, rel=1e-3)
    assert not told(tmp_path, "diagnosis_failed")
