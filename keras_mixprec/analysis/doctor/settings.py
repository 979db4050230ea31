"""Settings that are in force and change what 16 bits bring.

A row for each that is set; `ROWS` are the functions that make them, each of
which returns a list.
"""

import os
from typing import NamedTuple

import keras

from keras_mixprec.policies.ignored_variables import ignored_variables
from keras_mixprec.policies.matmul_precision import in_force


class Setting(NamedTuple):
    """A setting in force.

    Attributes:
        name: String.
        value: String.
        note: String. What it does.
    """

    name: str
    value: str
    note: str


_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that a program sees",
    "NVIDIA_TF32_OVERRIDE": "0 turns TF32 off in all of NVIDIA's libraries",
    "TF_ENABLE_ONEDNN_OPTS": "0 turns TensorFlow's bfloat16 on CPUs off",
    "ONEDNN_MAX_CPU_ISA": "the instructions that oneDNN may use on CPUs",
    "ATEN_CPU_CAPABILITY": "the instructions that torch may use on CPUs",
    "JAX_PLATFORMS": "the devices that JAX looks for",
    "JAX_DEFAULT_MATMUL_PRECISION": "the precision of JAX's products",
    "XLA_FLAGS": "options of XLA",
    "OMP_NUM_THREADS": "the threads of torch's products on CPUs",
}


def find_settings() -> list[Setting]:
    """Returns the settings that are in force."""
    return [setting for row in ROWS for setting in row()]


def _variables():
    return [
        Setting(name, os.environ[name], note)
        for name, note in _VARIABLES.items()
        if name in os.environ
    ]


def _global_policy():
    name = keras.config.dtype_policy().name
    if name == "float32":
        return []
    return [Setting("global policy", name, "the dtype of new layers")]


def _matmul_precision():
    note = "what float32 products are computed in"
    return [Setting("matmul precision", str(in_force()), note)]


def _ignored_variables():
    # Each sentence starts with NAME=VALUE.
    return [
        Setting(*text.split()[0].split("=", 1), text)
        for text in ignored_variables()
    ]


ROWS = (_variables, _ignored_variables, _matmul_precision, _global_policy)
