"""The versions of everything that computes: what an issue should name."""

import importlib.metadata
import platform

from keras_mixprec._version import __version__

_PACKAGES = ("keras", "numpy", "ml_dtypes", "tensorboard", "setuptools")

# CUDA's libraries, where pip brings them.
_PREFIX = "nvidia-"
_LIBRARIES = {"cudnn": "cudnn", "cuda-runtime": "cuda"}


def find_versions() -> dict[str, str]:
    """Returns versions by name, of what is known without a backend."""
    found = {"keras_mixprec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        if version := installed(name):
            found[name] = version
    return found | _libraries() | {"system": platform.platform(terse=True)}


def installed(name: str) -> str:
    """Returns the version of an installed package, `""` if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _libraries():
    found = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if name.startswith(_PREFIX):
            part = name.removeprefix(_PREFIX).rpartition("-cu")[0]
            if part in _LIBRARIES:
                found[_LIBRARIES[part]] = package.version
    return found
