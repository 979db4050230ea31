"""Finds the CPU's name, memory and instructions for 16-bit numbers."""

import functools
import os
import pathlib
import platform
import subprocess
from typing import NamedTuple

# The instruction sets behind the flags of Linux and macOS. One table serves all
# CPU vendors, because no two vendors use the same flag.
_NAMES = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "amx_tf32": "AMX-TF32",
    "amx_fp8": "AMX-FP8",
    "avx10": "AVX10",
    "avx10_1": "AVX10.1",
    "avx10_2": "AVX10.2",
    "asimd": "NEON",
    "asimdhp": "FP16",
    "bf16": "BF16",
    "sve": "SVE",
    "svebf16": "SVE-BF16",
    "sme": "SME",
    "feat_fp16": "FP16",
    "feat_bf16": "BF16",
    "neon_fp16": "FP16",
    "feat_sme": "SME",
}


class Processor(NamedTuple):
    """The name and the instruction sets of a CPU.

    Attributes:
        name: String.
        instructions: Tuple of the names of the instruction sets that matter in
            16 bits, `None` if the system does not report them.
    """

    name: str
    instructions: tuple[str, ...] | None


@functools.cache
def this_processor() -> Processor:
    """Returns the CPU of this machine."""
    system = platform.system()
    if system == "Linux":
        try:
            text = pathlib.Path("/proc/cpuinfo").read_text()
        except OSError:
            text = ""
        return parse_cpuinfo(text)
    if system == "Darwin":
        return parse_sysctl(_sysctl())
    # Windows has no file that lists the CPU's instruction sets.
    return Processor(platform.processor() or "cpu", None)


def memory() -> int | None:
    """Returns the bytes of the machine's memory, `None` if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def parse_cpuinfo(text: str) -> Processor:
    r"""Returns the CPU that Linux's `/proc/cpuinfo` describes.

    Args:
        text: String, the content of that file.

    Example:
    >>> from keras_mixprec.devices.processor import parse_cpuinfo
    >>> parse_cpuinfo("model name : Some CPU\nflags : sse avx2 avx512_bf16")
    Processor(name='Some CPU', instructions=('AVX2', 'AVX512-BF16'))
    """
    found = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip().lower(), value.strip())
    # On 64-bit Arm, Linux lists "Features" instead of flags, and no model name.
    flags = found.get("flags", found.get("features"))
    name = found.get("model name", found.get("hardware", "")) or "cpu"
    return Processor(name, None if flags is None else _named(flags.split()))


def parse_sysctl(text: str) -> Processor:
    """Returns the CPU that the output of macOS' `sysctl -a` describes.

    Args:
        text: String, lines such as `hw.optional.arm.FEAT_BF16: 1`.
    """
    pairs = (line.partition(":")[::2] for line in text.splitlines())
    found = {key.strip(): value.strip() for key, value in pairs}
    name = found.get("machdep.cpu.brand_string", "cpu")
    flags = [
        key.rpartition(".")[2].lower()
        for key, value in found.items()
        if key.startswith("hw.optional.") and value == "1"
    ]
    # Macs with an Intel CPU list their instructions in `leaf7_features`.
    flags += found.get("machdep.cpu.leaf7_features", "").lower().split()
    return Processor(name, _named(flags) if len(found) > 1 else None)


def _named(flags):
    known = {_NAMES[flag] for flag in flags if flag in _NAMES}
    return tuple(
        name for name in dict.fromkeys(_NAMES.values()) if name in known
    )


def _sysctl():
    try:
        done = subprocess.run(
            ["sysctl", "machdep.cpu", "hw.optional"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
