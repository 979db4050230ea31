"""JAX's setting for float32 products: `jax_default_matmul_precision`."""

import contextlib

import jax

_VALUES = {
    "default": None,
    "float32": "float32",
    "tf32": "tensorfloat32",
    "bfloat16_3x": "BF16_BF16_F32_X3",
    "bfloat16": "BF16_BF16_F32",
}
_VALUES_OF_TPU = {"bfloat16_3x": "high", "bfloat16": "bfloat16"}

_NAMES = {
    None: "default",
    "default": "default",
    "bfloat16": "default",
    "highest": "float32",
    "float32": "float32",
    "F32_F32_F32": "float32",
    "high": "tf32",
    "tensorfloat32": "tf32",
    "TF32_TF32_F32": "tf32",
    "BF16_BF16_F32_X3": "bfloat16_3x",
    "BF16_BF16_F32": "bfloat16",
}
_NAMES_OF_TPU = dict.fromkeys(("high", "tensorfloat32"), "bfloat16_3x")

# Precisions that JAX applies to both matrix products and convolutions. JAX
# applies all other precisions, which name algorithms, to matrix products only.
_OF_BOTH = ("default", "float32", "tf32")


def put(name, kind):
    jax.config.update("jax_default_matmul_precision", _value(name, kind))


def scope(name, kind):
    return jax.default_matmul_precision(_value(name, kind))


def local_scope(name):
    # Leave the setting unchanged on a CPU, which computes in float32 in any
    # case. A changed setting would make JAX compile everything again.
    on_cpu = jax.local_devices()[0].platform == "cpu"
    if on_cpu and {name, read("cpu")[0]} <= {"default", "float32"}:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_VALUES[name])


def read(kind):
    value = jax.config.jax_default_matmul_precision
    names = _NAMES | _NAMES_OF_TPU if kind == "tpu" else _NAMES
    name = names.get(value, value)
    both = kind == "tpu" or name in _OF_BOTH
    return name, name if both else "default"


def names_of_cpu():
    return ()


def _value(name, kind):
    values = _VALUES | _VALUES_OF_TPU if kind == "tpu" else _VALUES
    return values[name]
