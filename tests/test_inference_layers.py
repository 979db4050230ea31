"""Unusual layers in 16 bits: lookups, int8 and LoRA."""

from importlib.util import find_spec

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 64)).astype("float32")
WORDS = np.array(["a b c", "b c", "c a a", "d"])

# Keras warns of layers that it cannot quantize.
pytestmark = pytest.mark.filterwarnings("ignore:Layer")

HAS_TEXT = keras.backend.backend() == "tensorflow"
needs_tensorflow = pytest.mark.skipif(
    find_spec("tensorflow") is None,
    reason="Keras looks words and integers up with TensorFlow",
)


def converted(model, x=X):
    return kmp.convert_for_inference(model, "float16", calibration=x)


def assert_close_to(model, small, x, tmp_path):
    """Checks the outputs of the new model, and that a file has the same."""
    exact, low = model.predict_on_batch(x), small.predict_on_batch(x)
    # Some ulps of float16 of sums of 64 products.
    np.testing.assert_allclose(low, exact, atol=5e-3 * np.abs(exact).max())
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    np.testing.assert_array_equal(loaded.predict_on_batch(x), low)


def sequential(shape, *stack, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


def string_lookup():
    lookup = layers.StringLookup(vocabulary=["a b c", "b c"])
    stack = [layers.Embedding(10, 4), layers.Flatten(), layers.Dense(3)]
    model = sequential((1,), lookup, *stack, dtype="string")
    return model, WORDS[:, None]


@pytest.mark.skipif(not HAS_TEXT, reason="Keras has no text there")
def test_text_is_looked_up(tmp_path):
    model, x = string_lookup()
    small, report = converted(model, x)
    assert {v.dtype for v in small.weights} == {"float16"}
    assert report.notes == []
    assert_close_to(model, small, x, tmp_path)


@needs_tensorflow
@pytest.mark.skipif(HAS_TEXT, reason="it is looked up there")
def test_text_that_the_backend_lacks_is_refused():
    with pytest.raises(ValueError, match="Only TensorFlow"):
        converted(*string_lookup())


@needs_tensorflow
def test_numbers_are_looked_up_and_raw_features_stay_wide(tmp_path):
    inputs = [keras.Input((1,), dtype="int64"), keras.Input((2,))]
    lookup = layers.IntegerLookup(vocabulary=[1, 2], output_mode="one_hot")
    scale = layers.Normalization(mean=1e5, variance=1e6, name="scale")
    x = layers.Concatenate()([lookup(inputs[0]), scale(inputs[1])])
    model = keras.Model(inputs, layers.Dense(3)(x))
    raw = RANDOM.normal(1e5, 1e3, (6, 2)).astype("float32")
    data = [np.array([[1], [2], [9]] * 2), raw]
    small, report = converted(model, data)
    assert report.wide_layers == ["integer_lookup", "scale"]
    assert_close_to(model, small, data, tmp_path)


def dense():
    first = layers.Dense(64, "relu", name="first")
    return sequential((64,), first, layers.Dense(4))


@pytest.mark.long
def test_quantized_layers_stay_and_the_others_are_converted(tmp_path):
    model = dense()
    model.get_layer("first").quantize("int8")
    small, report = converted(model)
    assert report.plan["first"] == "int8_from_float32"
    assert small.get_layer("first")._kernel.dtype == "int8"
    assert small.layers[1].kernel.dtype == "float16"
    assert_close_to(model, small, X, tmp_path)


def with_lora(model):
    layer = model.layers[0]
    layer.enable_lora(4)
    for variable in layer.weights:
        if variable.name.startswith("lora_"):
            variable.assign(RANDOM.normal(size=variable.shape))
    return model


@pytest.mark.one_backend
def test_lora_is_added_to_the_weights_of_its_layer(tmp_path):
    model = dense()
    count = len(model.weights)
    small, report = converted(with_lora(model))
    assert {v.dtype for v in small.weights} == {"float16"}
    assert len(small.weights) == count
    assert_close_to(model, small, X, tmp_path)
    assert model.layers[0].lora_enabled


@pytest.mark.one_backend
def test_lora_of_a_quantized_layer_is_refused():
    model = dense()
    model.quantize("int8")
    with_lora(model)
    with pytest.raises(ValueError, match="'first' is quantized"):
        converted(model)
