"""Reads GPUs and versions from the system, without a backend."""

import contextlib
import importlib.metadata
import pathlib
import platform
import re
import subprocess
from typing import NamedTuple

from keras_mixprec._version import __version__

_QUERY = "name,driver_version,memory.total,compute_cap"
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")

# Matches the line that nvidia-smi prints if no driver answers.
_FAILED = re.compile(r"^(NVIDIA-SMI has failed|Failed to|No devices).*", re.M)


class Gpus(NamedTuple):
    """NVIDIA's GPUs, as the system reports them.

    Attributes:
        names: Tuple of strings, as `nvidia-smi` prints them.
        driver: String, the driver's version, `""` if no driver answers.
        error: String, the error of `nvidia-smi`.
        on_bus: Int. The number of GPUs on the PCI bus, with or without a
            driver. `None` if the number is not known.
        memory: Tuple of ints, the bytes of memory of each GPU.
    """

    names: tuple = ()
    driver: str = ""
    error: str = ""
    on_bus: int | None = None
    memory: tuple = ()


def find_gpus() -> Gpus:
    """Returns the GPUs of this machine, in at most five seconds."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except FileNotFoundError:
        found = Gpus()
    except (OSError, subprocess.TimeoutExpired) as error:
        found = Gpus(error=f"nvidia-smi: {error}")
    else:
        found = parse_nvidia_smi(done.stdout + done.stderr)
    return found._replace(on_bus=_on_bus())


def parse_nvidia_smi(text: str) -> Gpus:
    """Returns the GPUs in the output of `nvidia-smi --query-gpu=...`.

    Args:
        text: String. Lines of name, driver, memory and compute capability, or
            an error.

    Example:
    >>> from keras_mixprec.analysis.doctor.machine import parse_nvidia_smi
    >>> parse_nvidia_smi("Tesla T4, 535.104.05, 15360 MiB, 7.5").driver
    '535.104.05'
    """
    if failed := _FAILED.search(text):
        return Gpus(error=failed.group())
    rows = [line.split(", ") for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    if not rows:
        return Gpus(error=" ".join(text.split())[:160])
    return Gpus(
        names=tuple(row[0] for row in rows),
        driver=rows[0][1],
        memory=tuple(_bytes(row[2]) for row in rows),
    )


def _bytes(text):
    number = text.removesuffix(" MiB")
    return int(number) * 2**20 if number.isdigit() else None


def _on_bus():
    folders = pathlib.Path("/sys/bus/pci/devices")
    if not folders.is_dir():
        return None
    count = 0
    for folder in folders.iterdir():
        with contextlib.suppress(OSError):
            vendor = (folder / "vendor").read_text().strip()
            kind = (folder / "class").read_text().strip()
            count += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return count


_PACKAGES = ("keras", "numpy", "ml_dtypes", "tensorboard", "setuptools")

# Maps the name of a CUDA library in a pip package to its name in the report.
_LIBRARIES = {"cudnn": "cudnn", "cuda-runtime": "cuda"}


def find_versions() -> dict[str, str]:
    """Returns versions by name, without importing a backend."""
    found = {"keras_mixprec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        if version := installed(name):
            found[name] = version
    return found | _libraries() | {"system": platform.platform(terse=True)}


def installed(name: str) -> str:
    """Returns the version of a package, `""` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _libraries():
    found = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if name.startswith("nvidia-"):
            part = name.removeprefix("nvidia-").rpartition("-cu")[0]
            if part in _LIBRARIES:
                found[_LIBRARIES[part]] = package.version
    return found
