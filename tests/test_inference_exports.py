"""Exported files of converted models work in their runtimes."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(8, 12, 12, 1)).astype("float32")

# The exporters warn.
pytestmark = pytest.mark.filterwarnings("ignore")


def only(*backends):
    return pytest.mark.skipif(BACKEND not in backends, reason="is not written")


def network():
    stack = [layers.Conv2D(8, 3, activation="relu"), layers.Flatten()]
    stack.insert(1, layers.BatchNormalization())
    wide = layers.Dense(16, activation="relu", name="wide")
    last = layers.Dense(4, activation="softmax")
    return keras.Sequential([keras.Input((12, 12, 1)), *stack, wide, last])


def converted(dtype="float16"):
    rules = [kmp.PrecisionRule("wide", reason="one of them")]
    return kmp.convert_for_inference(
        network(), dtype, calibration=X, rules=rules
    )


def export(small, path, form):
    signature = [keras.InputSpec(shape=X.shape, dtype="float32")]
    small.export(path, format=form, input_signature=signature, verbose=False)
    return path


@only("tensorflow", "jax")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensorflow_loads_the_same_dtypes_and_numbers(dtype, tmp_path):
    tf = pytest.importorskip("tensorflow")
    small, _ = converted(dtype)
    small.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    assert {v.dtype.name for v in loaded.variables} == {dtype, "float32"}
    # Programs of JAX and TensorFlow round differently, by one float16 ulp of a
    # probability below 1.
    atol = 5e-4 if BACKEND == "jax" else 1e-6
    y = small.predict(X, verbose=0)
    np.testing.assert_allclose(loaded.serve(X), y, rtol=0, atol=atol)


@pytest.mark.long
@only("tensorflow", "torch")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_onnxruntime_computes_the_same_and_has_no_bfloat16(dtype, tmp_path):
    import onnx
    import onnxruntime

    small, _ = converted(dtype)
    path = export(small, str(tmp_path / "small.onnx"), "onnx")
    if dtype == "bfloat16":
        with pytest.raises(Exception, match="bfloat16"):
            onnxruntime.InferenceSession(path)
        return
    graph = onnx.load(path).graph
    stored = {t.data_type for t in graph.initializer if len(t.dims) > 1}
    assert {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT} <= stored
    session = onnxruntime.InferenceSession(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(y, small.predict(X, verbose=0), atol=2e-3)
