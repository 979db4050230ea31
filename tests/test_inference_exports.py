"""What exported files of converted models keep, by the runtimes for them."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

BACKEND = keras.backend.backend()

pytestmark = pytest.mark.skipif(BACKEND == "jax", reason="exported by others")
only_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="TensorFlow writes it"
)

X = np.random.default_rng(0).normal(size=(8, 12, 12, 1)).astype("float32")


def network():
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(16, activation="relu", name="wide"),
            layers.Dense(4, activation="softmax"),
        ]
    )


def converted(model=None, dtype="float16"):
    rules = [kmp.PrecisionRule("wide", reason="one of them")]
    return kmp.convert_for_inference(
        model or network(), dtype, calibration=X, rules=rules
    )


@only_tensorflow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensorflow_loads_the_same_dtypes_and_numbers(dtype, tmp_path):
    import tensorflow as tf

    small, report = converted(dtype=dtype)
    small.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    assert {v.dtype.name for v in loaded.variables} == {dtype, "float32"}
    y = small.predict(X, verbose=0)
    np.testing.assert_allclose(loaded.serve(X), y, rtol=0, atol=1e-6)
    assert "keeps" in report.exports["tf_saved_model"]


# Those that export warn of their own parts, and of what they lack.
@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_computes_the_same_from_16_bit_weights(tmp_path):
    import onnx
    import onnxruntime

    small, report = converted()
    path = str(tmp_path / "small.onnx")
    signature = [keras.InputSpec(shape=X.shape, dtype="float32")]
    small.export(path, format="onnx", input_signature=signature, verbose=False)
    graph = onnx.load(path).graph
    stored = {t.data_type for t in graph.initializer if len(t.dims) > 1}
    assert {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT} <= stored
    session = onnxruntime.InferenceSession(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(y, small.predict(X, verbose=0), atol=2e-3)
    assert "keeps" in report.exports["onnx"]


@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_has_no_bfloat16_as_the_report_says(tmp_path):
    import onnxruntime

    small, report = converted(dtype="bfloat16")
    path = str(tmp_path / "small.onnx")
    signature = [keras.InputSpec(shape=X.shape, dtype="float32")]
    small.export(path, format="onnx", input_signature=signature, verbose=False)
    with pytest.raises(Exception, match="bfloat16"):
        onnxruntime.InferenceSession(path)
    assert "float16" in report.exports["onnx"]


# TensorFlow deprecates its own interpreter.
@only_tensorflow
@pytest.mark.filterwarnings("ignore")
def test_litert_takes_the_way_that_the_report_gives(tmp_path):
    import tensorflow as tf

    model = network()
    small, report = converted(model)
    small.export(str(tmp_path / "no.tflite"), format="litert", verbose=False)
    with pytest.raises(RuntimeError, match="Flex|Select TensorFlow"):
        tf.lite.Interpreter(str(tmp_path / "no.tflite")).allocate_tensors()
    assert "supported_types" in report.exports["litert"]
    model.export(
        str(tmp_path / "yes.tflite"),
        format="litert",
        verbose=False,
        optimizations=[tf.lite.Optimize.DEFAULT],
        target_spec={"supported_types": [tf.float16]},
    )
    found = tf.lite.Interpreter(str(tmp_path / "yes.tflite"))
    (given,), (taken,) = found.get_input_details(), found.get_output_details()
    found.resize_tensor_input(given["index"], X.shape)
    found.allocate_tensors()
    found.set_tensor(given["index"], X)
    found.invoke()
    y = found.get_tensor(taken["index"])
    np.testing.assert_allclose(y, model.predict(X, verbose=0), atol=2e-3)
    stored = {t["dtype"].__name__ for t in found.get_tensor_details()}
    assert "float16" in stored
