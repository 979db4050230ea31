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


# Keras' default for recurrent weights needs a QR decomposition, which torch
# does not have in 16 bits.
_RECURRENT = {"recurrent_initializer": "glorot_uniform"}


class _SelfAttention(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.heads = layers.MultiHeadAttention(2, 4, name="heads")

    def call(self, x):
        return self.heads(x, x)


_RANDOM = np.random.default_rng(0)
_ROWS = _RANDOM.normal(size=(16, 8))
_IMAGES = _RANDOM.normal(size=(16, 8, 8, 3))
_SEQUENCES = _RANDOM.normal(size=(16, 5, 8))
_KINDS = ["norm", *map(rarely, ("convolution", "recurrent", "attention"))]
_KINDS += ["embedding", rarely("statistics")]


def _stack(kind):
    """Layers of a kind, and what they are given."""
    if kind == "convolution":
        return [layers.Conv2D(4, 3), layers.SeparableConv2D(4, 3)], _IMAGES
    if kind == "norm":
        norms = layers.LayerNormalization, layers.RMSNormalization
        return [norm() for norm in norms], _ROWS
    if kind == "recurrent":
        lstm = layers.LSTM(4, return_sequences=True, **_RECURRENT)
        gru = layers.Bidirectional(layers.GRU(4, **_RECURRENT))
        return [lstm, gru], _SEQUENCES
    if kind == "attention":
        return [_SelfAttention()], _SEQUENCES
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


@pytest.mark.parametrize("kind", _KINDS)
def test_a_sound_layer_is_compared_and_not_blamed(kind, policy):
    if kind == "statistics":
        # A variance near 1, of which bfloat16 has multiples of 1/256.
        stack, x = [layers.BatchNormalization()], _ROWS
    else:
        stack, x = _stack(kind)
    found = kmp.diagnose(_model(stack, x), x, np.ones((len(x), 1)))
    assert [verdict.kind for verdict in found] == ["policy"]


class _Codebook(layers.Layer):
    """The nearest of four codes, which are moving averages of their rows."""

    def __init__(self, decay, **kwargs):
        super().__init__(**kwargs)
        self.decay = decay

    def build(self, shape):
        self.codes = self.add_weight(
            (4, shape[-1]),
            keras.initializers.Identity(4.0),
            trainable=False,
            autocast=False,
            name="codes",
        )

    def call(self, x):
        codes = ops.cast(self.codes, x.dtype)
        apart = ops.expand_dims(x, 1) - ops.expand_dims(codes, 0)
        nearest = ops.argmin(ops.sum(ops.square(apart), -1), axis=-1)
        one_hot = ops.one_hot(nearest, 4, dtype=x.dtype)
        rows = ops.maximum(ops.sum(one_hot, 0), 1)[:, None]
        mean = ops.matmul(ops.transpose(one_hot), x) / rows
        self.codes.assign(self.decay * codes + (1 - self.decay) * mean)
        return x + ops.stop_gradient(ops.matmul(one_hot, codes) - x)


def _codebook(decay):
    # Four heaps, each nearer to a code of its own than any rounding changes.
    x = 8.0 * np.eye(4, 8)[np.arange(64) % 4]
    x += np.random.default_rng(0).normal(size=x.shape) / 8
    model = _model([_Codebook(decay, name="quantizer")], x)
    return model, kmp.diagnose(model, x, np.ones((64, 1)))


@pytest.mark.parametrize("decay", [rarely(0.5), 0.999])
def test_a_codebook_that_stands_still_is_named(policy, decay):
    # A thousandth of what a code lacks is less than half of its last digit
    # long before it is there; half of it is not.
    model, (verdict,) = _codebook(decay)
    assert (verdict.kind, verdict.direction) == ("policy", "update")
    if decay == 0.5:
        assert verdict.layer is None
    else:
        (codes,) = model.get_layer("quantizer").non_trainable_variables
        assert verdict.layer == "quantizer"
        assert verdict.numbers["variable"] == codes.path
        assert codes.path in verdict.advice
        assert f"dtype='mixed_{policy}'" in verdict.advice
    # As well if it is only computed in 16 bits.
    keras.config.set_dtype_policy(f"mixed_{policy}")
    _, found = _codebook(decay)
    named = [(v.layer, v.kind, v.direction) for v in found if v.layer]
    fault = ("quantizer", "precision_loss", "update")
    assert named == ([fault] if decay == 0.999 else [])


class _SquaredConv(layers.Conv2D):
    def call(self, x):
        return ops.sqrt(ops.square(super().call(x) * 400.0))


@pytest.mark.one_backend
def test_a_layer_that_overflows_is_named():
    keras.config.set_dtype_policy("float16")
    x = np.full((16, 8, 8, 3), 4.0)
    squared = _SquaredConv(4, 3, kernel_initializer="ones", name="squared")
    model = _model([squared], x)
    first, *_ = kmp.diagnose(model, x, np.ones((16, 1)))
    found = first.kind, first.layer, first.direction
    assert found == ("forward_overflow", "squared", "forward")


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
    # Of 27 products of ones, in float32.
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    history = model.fit(x, np.ones((16, 1)), epochs=8, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    # Its file loads without this package.
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    assert type(loaded.layers[1].dtype_policy) is keras.DTypePolicy
    for own, other in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(own, other)


class Late(layers.Layer):
    """Builds its attention by calling it, as many layers do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.gain = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return self.attention(x * self.gain, x)


@pytest.mark.one_backend
def test_float32_weights_that_a_call_makes_are_no_16_bit_ones():
    keras.config.set_dtype_policy("float32")
    model = keras.Sequential([Late(), layers.Dense(1)])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model(np.ones((2, 3, 8), "float32"))
    assert {str(w.dtype) for w in model.weights} == {"float32"}
    inside = model.layers[0].attention._flatten_layers()
    policies = {layer.dtype_policy.variable_dtype for layer in inside}
    assert policies == {"float32"}


@pytest.mark.parametrize("kind", ["MixPrecMonitor", rarely("PrecisionTuner")])
def test_a_model_of_16_bits_alone_is_trained_twice(kind, policy, tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8, 4), "float32")
    for _ in range(2):  # The second begins with a look at the weights.
        arguments = {"log_dir": tmp_path} if "Monitor" in kind else {}
        callback = getattr(kmp, kind)(verbose=0, **arguments)
        model.fit(x, x[:, :1], verbose=0, callbacks=[callback])
