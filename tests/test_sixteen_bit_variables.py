"""Layers whose variables are stored in 16 bits, against float32."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import rarely

import keras_mixprec as kmp
from keras_mixprec.keras_internals import stored_value
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import in_float32


@pytest.fixture(params=["float16", rarely("bfloat16")])
def policy(request):
    keras.config.set_dtype_policy(request.param)
    return request.param


_RANDOM = np.random.default_rng(0)
_ROWS = _RANDOM.normal(size=(16, 8))
_IMAGES = _RANDOM.normal(size=(16, 8, 8, 3))


def _stack(kind):
    """Layers of a kind, and what they are given."""
    if kind == "convolution":
        return [layers.Conv2D(4, 3), layers.SeparableConv2D(4, 3)], _IMAGES
    if kind == "norm":
        norms = layers.LayerNormalization, layers.RMSNormalization
        return [norm() for norm in norms], _ROWS
    return [layers.Embedding(11, 8)], np.arange(80).reshape(16, 5) % 11


def _model(stack, x, learning_rate=0.1):
    """Under the global policy, as the layers of the stack."""
    is_integer = np.issubdtype(x.dtype, np.integer)
    inputs = keras.Input(x.shape[1:], dtype="int32" if is_integer else None)
    hidden = inputs
    for layer in stack:
        hidden = layer(hidden)
    outputs = layers.Dense(1, name="head")(layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(learning_rate)
    if keras.config.dtype_policy().name == "float16":
        optimizer = kmp.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


@pytest.mark.parametrize("kind", ["norm", rarely("convolution"), "embedding"])
def test_a_sound_layer_is_compared_and_not_blamed(kind, policy):
    stack, x = _stack(kind)
    found = kmp.diagnose(_model(stack, x), x, np.ones((len(x), 1)))
    assert [verdict.kind for verdict in found] == ["policy"]


def test_a_reference_has_gradients_of_float32(policy):
    x = np.full((16, 8), 2.0**-20)
    model = _model([], x)
    model.optimizer.build(model.trainable_variables)
    kernel, _ = model.get_layer("head").trainable_variables
    batch = x.astype("float32"), np.ones((16, 1), "float32")
    step = exact_step(model, batch)
    # 2 * mean((x @ w - 1) * x): below 2**-24, the least of float16.
    error = x @ ops.convert_to_numpy(kernel).astype("float64") - 1
    exact = 2 * (error * x).mean(axis=0)
    found = ops.convert_to_numpy(step.gradients[id(kernel)])[:, 0]
    np.testing.assert_allclose(found * 2**19, exact * 2**19, rtol=1e-5)

    # Variables are as they were behind it.
    before = [(v.dtype, stored_value(v)) for v in model.weights]
    with in_float32(model):
        assert {v.dtype for v in model.weights} == {"float32"}
    after = [(v.dtype, stored_value(v)) for v in model.weights]
    for (dtype, value), (own_dtype, own) in zip(before, after, strict=True):
        assert own_dtype == dtype == policy
        assert own is value


@pytest.mark.long
def test_a_layer_in_float32_computes_with_variables_of_16_bits(
    policy, tmp_path
):
    stack, x = _stack("convolution")
    x = x.astype("float32")
    model = _model(stack, x, learning_rate=0.01)
    kmp.apply_policy(model, policy, rules=[kmp.PrecisionRule("conv2d")])
    convolution = model.layers[1]
    kernel, _ = map(ops.convert_to_numpy, convolution.weights)
    assert convolution.weights[0].dtype == policy
    found = ops.convert_to_numpy(convolution(x))[:, 0, 0]
    exact = np.einsum("nhwc,hwco->no", x[:, :3, :3], kernel.astype("float64"))
    # Each is a sum of 27 products, in float32.
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    history = model.fit(x, np.ones((16, 1)), epochs=8, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    # Its file loads without this package.
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    assert type(loaded.layers[1].dtype_policy) is keras.DTypePolicy
    for own, other in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(own, other)
