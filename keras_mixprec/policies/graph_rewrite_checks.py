"""Where the graph rewrite cannot do what is asked of it, and what can."""

import warnings
from collections import Counter

import keras

from keras_mixprec._checks import check_choice, check_list, check_type
from keras_mixprec.backend import active

_DTYPES = ("float16", "bfloat16", "float32")

_NEEDS = {
    "float16": "it does on NVIDIA GPUs of compute capability 7.0 or higher, "
    "and on CPUs with AMX-FP16 or AVX-NE-CONVERT",
    "bfloat16": "it does on CPUs with AVX-512, with oneDNN "
    "(TF_ENABLE_ONEDNN_OPTS is not 0) and without a visible GPU",
}

_WITHOUT_EFFECT = {
    "jit_compile": "XLA compiles this model, and the graph rewrite does not "
    "reach what XLA compiles. Compile the model with `jit_compile=False`",
    "run_eagerly": "This model runs without a graph, so there is none to "
    "rewrite. Compile the model with `run_eagerly=False, jit_compile=False`",
}

_warned = set()


def check_arguments(dtype: str, lists: dict) -> dict[str, list]:
    """Returns the lists as lists, or raises saying what is wrong.

    Args:
        dtype: String.
        lists: Dict from `"allow"`, `"deny"`, `"infer"` to what was given.
    """
    check_choice("dtype", check_type("dtype", dtype, str, "a string"), _DTYPES)
    what = "a list of names of operations"
    checked = {n: check_list(n, given, str, what) for n, given in lists.items()}
    if (backend := keras.backend.backend()) != "tensorflow":
        sixteen = "bfloat16" if dtype == "float32" else dtype
        raise ValueError(
            "Only TensorFlow rewrites graphs; elsewhere set a policy: "
            f"keras_mixprec.set_global_policy('mixed_{sixteen}'). "
            f"Received: dtype={dtype!r} with the backend {backend!r}"
        )
    _check_operations(checked)
    return checked


def check_device(dtype: str) -> None:
    """Raises if TensorFlow does not rewrite graphs to a dtype here."""
    if dtype == "float32" or active.graph_rewrite().does(dtype):
        return
    device = ", ".join(dict.fromkeys(active.devices()["devices"]))
    raise ValueError(
        f"TensorFlow does not rewrite graphs to {dtype} on this device "
        f"({device}): {_NEEDS[dtype]}. With a policy it computes in it "
        f"anywhere: keras_mixprec.set_global_policy('mixed_{dtype}'). "
        f"Received: dtype={dtype!r}"
    )


def check_model(model, dtype: str, trains: bool) -> None:
    """Raises if a rewrite does not reach a model, warns if scaling lacks.

    Args:
        model: A `keras.Model`.
        dtype: String.
        trains: Boolean. Whether the model is to be trained.
    """
    for name, reason in _WITHOUT_EFFECT.items():
        if getattr(model, name):
            raise ValueError(
                f"{reason}, or leave `graph_rewrite` and set a policy: "
                f"keras_mixprec.apply_policy(model, 'mixed_{dtype}'). "
                f"Received: a model with {name}=True"
            )
    scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if trains and dtype == "float16" and not scales and "scale" not in _warned:
        _warned.add("scale")
        warnings.warn(
            "`graph_rewrite('float16')` is in force and nothing scales the "
            "loss: small gradients become zero. Compile the model with "
            "`keras_mixprec.LossScaleOptimizer`, and call `scale_loss` in a "
            "`train_step` of your own.",
            UserWarning,
            stacklevel=4,
        )


def _check_operations(lists):
    counts = Counter(x for names in lists.values() for x in set(names))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "An operation can be in one of `allow`, `deny` and `infer` only. "
            f"Received: {twice[0]!r} in several"
        )
    if unknown := active.graph_rewrite().unknown(counts):
        raise ValueError(
            "`allow`, `deny` and `infer` are types of operations as TensorFlow "
            "names them, such as 'MatMul', 'Conv2D' or 'Softmax'. "
            f"Received: {unknown[0]!r}"
        )
