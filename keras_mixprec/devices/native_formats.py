"""The table of the number formats that devices support.

Each entry names the web page that documents it.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

FORMATS = ("bfloat16", "float16", "tf32", "float8")

_TENSOR_CORES = "https://nvidia.github.io/TransformerEngine/support_matrix.html"
_AMPERE = "https://github.com/tensorflow/community/pull/247"
_VOLTA = (
    "https://docs.nvidia.com/tao/tao-toolkit/latest/text/"
    "automatic_mixed_precision.html"
)
_CUDA_GUIDE = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html"
_TURING = "https://github.com/pytorch/pytorch/issues/58123"
_AMD = "https://rocm.docs.amd.com/en/latest/reference/precision-support.html"
_TPU = "https://docs.cloud.google.com/tpu/docs/bfloat16"
_TPU7 = "https://docs.cloud.google.com/tpu/docs/ironwood-performance"
_INTEL = "https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html"
_APPLE = "https://github.com/huggingface/transformers/pull/40458"
_SLOW_CPU = "https://github.com/pytorch/pytorch/issues/146508"

# Names of GPUs with Turing chips (TU116, TU117) that have no tensor cores but
# report the same capability, 7.5, as chips with tensor cores: GTX 16 series,
# MX450 and MX550, Quadro T series (not the Tesla T4), CMP 30HX.
_NO_TENSOR_CORES = re.compile(
    r"\b(GTX 16\d\d|MX[45]50|T(400|5[05]0|600|1000|1200|2000)|CMP 30HX)\b"
)


class Support(NamedTuple):
    """How a device supports a format.

    Attributes:
        status: String. `"native"`: it has instructions or units for the format.
            `"emulated"`: it computes in float32 and rounds. `"absent"`: it
            lacks the format. `"unknown"`: it does not report the format.
        note: String. The units for the format, or why there are none.
        source: String. The page that documents the support, `""` if the device
            itself reports it.
        matrix: Boolean. `True` if the device has units for matrix products in
            the format, which are several times as fast as float32.
    """

    status: str
    note: str
    source: str = ""
    matrix: bool = False


def _units(note, source):
    return Support("native", note, source, matrix=True)


_FROM_VOLTA = "no tensor cores, which need compute capability 7.0 or higher"
_UNKNOWN = Support("unknown", "the device does not report it")
_NO_UNITS = Support("absent", "no units for it")

# The support for each number format, by the lowest compute capability that has
# this support.
_CUDA = {
    "bfloat16": {
        (8, 0): _units("bfloat16 tensor cores", _TENSOR_CORES),
        (0, 0): Support("emulated", "needs 8.0", _TENSOR_CORES),
    },
    "float16": {
        (7, 0): _units("float16 tensor cores", _VOLTA),
        (6, 2): Support("native", _FROM_VOLTA, _CUDA_GUIDE),
        # GPUs of capability 6.1 run float16 at 1/64 of float32's rate, so
        # float16 counts as emulated.
        (6, 1): Support("emulated", _FROM_VOLTA, _CUDA_GUIDE),
        (5, 3): Support("native", _FROM_VOLTA, _CUDA_GUIDE),
        (0, 0): Support("emulated", _FROM_VOLTA, _CUDA_GUIDE),
    },
    "tf32": {
        (8, 0): _units("TF32 tensor cores", _AMPERE),
        (0, 0): Support("absent", "needs 8.0", _AMPERE),
    },
    "float8": {
        (8, 9): _units("float8 tensor cores", _TENSOR_CORES),
        (0, 0): Support("absent", "needs 8.9", _TENSOR_CORES),
    },
}

# The formats of AMD GPUs with matrix units: CDNA, RDNA 3 and RDNA 4.
_ROCM = {
    "gfx908": ("float16", "bfloat16"),
    "gfx90a": ("float16", "bfloat16"),
    "gfx942": ("float16", "bfloat16", "tf32", "float8"),
    "gfx950": ("float16", "bfloat16", "float8"),
    "gfx110": ("float16", "bfloat16"),
    "gfx120": ("float16", "bfloat16", "float8"),
}

# The CPU instruction sets that compute in each format, the fastest first.
_CPU = {
    "bfloat16": ("AMX-BF16", "AVX512-BF16", "AVX10.1", "SVE-BF16", "BF16"),
    "float16": ("AMX-FP16", "AVX512-FP16", "AVX10.1", "FP16"),
    "tf32": ("AMX-TF32",),
    "float8": ("AMX-FP8",),
}

# The formats of each kind of device whose models all have the same formats.
_OTHERS = {
    "tpu": {
        "bfloat16": _units("matrix units for bfloat16", _TPU),
        "float16": Support("emulated", "the units compute in bfloat16", _TPU),
    },
    "xpu": {
        "bfloat16": _units("XMX engines", _INTEL),
        "float16": _units("XMX engines", _INTEL),
    },
    "mps": {
        "bfloat16": Support(
            "unknown", "emulated on M1 and M2, native on later chips", _APPLE
        ),
        "float16": Support("native", "no matrix units for it", _APPLE),
        "tf32": _NO_UNITS,
        "float8": _NO_UNITS,
    },
}


def formats_of(
    kind: str,
    name: str = "",
    capability: Collection | None = None,
    architecture: str = "",
    instructions: Collection | None = None,
) -> dict[str, Support]:
    """Returns the support of a device for each of `FORMATS`.

    Args:
        kind: String. The kind of the device, such as `"cpu"`, `"cuda"` or
            `"tpu"`.
        name: String. The device's name.
        capability: Tuple of two ints. CUDA's compute capability.
        architecture: String. The architecture of an AMD GPU, such as
            `"gfx90a"`.
        instructions: Collection of strings. The instructions of a CPU, as in
            `devices.processor.Processor`.

    Example:
    >>> from keras_mixprec.devices.native_formats import formats_of
    >>> formats_of("cuda", "Tesla T4", (7, 5))["bfloat16"].status
    'emulated'
    """
    if capability is not None:
        found = {f: _from(rows, capability) for f, rows in _CUDA.items()}
        if lacks_tensor_cores(name):
            wrong = Support("native", "no tensor cores, may be wrong", _TURING)
            found["float16"] = wrong
        return found
    if kind == "cpu":
        return {format: _of_cpu(format, instructions) for format in FORMATS}
    if kind == "rocm":
        return {format: _of_amd(format, architecture) for format in FORMATS}
    found = dict.fromkeys(FORMATS, _UNKNOWN) | _OTHERS.get(kind, {})
    if kind == "tpu":
        seventh = re.search(r"\b(v?7x?|7x)\b", name.removeprefix("TPU"))
        found["tf32"] = _NO_UNITS
        found["float8"] = _units("TPU7x", _TPU7) if seventh else _NO_UNITS
    return found


def lacks_tensor_cores(name: str) -> bool:
    """Returns whether a CUDA device with this name has no tensor cores."""
    return bool(_NO_TENSOR_CORES.search(name))


def _from(rows, capability):
    capability = tuple(capability)
    return next(rows[low] for low in rows if capability >= low)


def _of_cpu(format, instructions):
    if instructions is None:
        return _UNKNOWN
    having = [name for name in _CPU[format] if name in instructions]
    if having:
        # AMX is a matrix unit, but the result does not mark it as one, because
        # some backends do not use AMX.
        return Support("native", having[0])
    if format in ("tf32", "float8"):
        return _NO_UNITS
    wanted = " or ".join(_CPU[format][:2])
    return Support("emulated", f"no {wanted}", _SLOW_CPU)


def _of_amd(format, architecture):
    if not architecture:
        return _UNKNOWN
    having = next(
        (f for start, f in _ROCM.items() if architecture.startswith(start)), ()
    )
    if format in having:
        return _units("matrix cores", _AMD)
    if format in ("tf32", "float8"):
        return Support("absent", "no matrix cores for it", _AMD)
    return Support("emulated", "no matrix cores for it", _AMD)
