"""What each format that `model.export` writes keeps of 16-bit layers.

As `tests/test_inference_exports.py` finds it, which loads each file with the
runtime that it is for.
"""

import keras

from keras_mixprec.policies.plan import PrecisionPlan

KEPT = "keeps every layer's dtype."

_LITERT = (
    "does not run without TensorFlow's Flex operations. Export the float32 "
    "model instead, with weights stored in float16: `model.export('m.tflite', "
    "format='litert', optimizations=[tf.lite.Optimize.DEFAULT], "
    "target_spec={'supported_types': [tf.float16]})`."
)

_NOT_FROM_JAX = (
    "is not written from JAX without more packages: save a .keras file, load "
    "it with KERAS_BACKEND={} and export that."
)


def kept_by_exports(plan: PrecisionPlan) -> dict[str, str]:
    """Returns what each format keeps of a plan, by Keras' name for it.

    Args:
        plan: A `PrecisionPlan` of a converted model.
    """
    policies = {plan.default, *plan.values()}
    low = {p.removeprefix("mixed_") for p in policies if p.endswith("float16")}
    if not low:
        return {}
    onnx, litert = KEPT, _LITERT
    if keras.backend.backend() == "jax":
        onnx = _NOT_FROM_JAX.format("torch")
        litert = f"{_NOT_FROM_JAX.format('tensorflow')} There it {_LITERT}"
    if "bfloat16" in low:
        onnx = (
            "onnxruntime computes few operations in bfloat16 on CPUs and "
            "refuses the file: convert to float16."
        )
    return {
        "tf_saved_model": KEPT,
        "onnx": onnx,
        "litert": litert,
    }
