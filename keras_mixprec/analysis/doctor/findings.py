"""Finds problems in the facts about a machine."""

import functools
import tomllib
from importlib import resources
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from keras_mixprec.analysis.doctor.machine import Gpus
from keras_mixprec.devices.native_formats import lacks_tensor_cores

# The oldest driver that works with each major version of CUDA.
_DRIVERS = {"10": "440.33", "11": "450.80", "12": "525.60", "13": "580.65"}
_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"


class Finding(NamedTuple):
    """A problem with a machine.

    Attributes:
        name: String that identifies the problem.
        level: String: `"error"` or `"warning"`.
        text: String. A description of the problem.
        fix: String. The remedy.
        evidence: String. A page or a run that shows the problem. `""` if the
            machine itself shows it.
    """

    name: str
    level: str
    text: str
    fix: str
    evidence: str = ""


def judge(facts: dict, gpus: Gpus) -> list[Finding]:
    """Returns the problems that the facts show, errors first.

    Args:
        facts: Dict. `backend` is the backend's name. `status` is `"ok"`,
            `"missing"` or `"broken"`, and `error` is the reason. `kind`,
            `devices`, `compute_capability` and `instructions` are as in
            `recommend_policy().capabilities`, `None` or empty without a
            backend. `versions` is a dict of strings.
        gpus: `Gpus`, as the system reports them.
    """
    found = [
        *_backend(facts),
        *_unseen(facts, gpus),
        *_driver(facts, gpus),
        *_kernels(facts),
        *_known_bad(facts),
    ]
    return sorted(found, key=lambda finding: finding.level)


def _backend(facts):
    if facts["status"] == "missing":
        yield Finding(
            "backend-missing",
            "error",
            f"{facts['backend']} is not installed: {facts['error']}",
            f"pip install {facts['backend']}",
        )
    elif facts["status"] != "ok":
        yield Finding(
            "backend-broken",
            "error",
            f"{facts['backend']} does not work: {facts['error']}",
            "reinstall it with the versions that it requires, in a new "
            "environment",
        )


def _unseen(facts, gpus):
    """Yields a finding if the backend does not use the machine's GPUs."""
    if facts["kind"] != "cpu":
        return
    if gpus.names:
        yield Finding(
            "gpu-unseen",
            "error",
            f"{facts['backend']} computes on the CPU, but nvidia-smi lists "
            f"{', '.join(dict.fromkeys(gpus.names))}",
            _BUILDS.get(facts["backend"], "install its build for CUDA")
            + "; check CUDA_VISIBLE_DEVICES",
            "https://github.com/tensorflow/tensorflow/issues/62328",
        )
    elif gpus.error or gpus.on_bus:
        said = gpus.error or f"{gpus.on_bus} on the PCI bus, but no nvidia-smi"
        yield Finding(
            "no-driver",
            "error",
            f"the driver of an NVIDIA GPU does not answer: {said}",
            "install NVIDIA's driver and restart; start a container with "
            "docker run --gpus all",
            "https://github.com/pytorch/pytorch/issues/67991",
        )


_BUILDS = {
    "tensorflow": "pip install 'tensorflow[and-cuda]'",
    "jax": "pip install 'jax[cuda13]' or 'jax[cuda12]'",
    "torch": "install torch for CUDA, see https://pytorch.org",
}


def _driver(facts, gpus):
    cuda = facts["versions"].get("cuda", "")
    needed = _DRIVERS.get(cuda.partition(".")[0])
    if needed and gpus.driver and _numbers(gpus.driver) < _numbers(needed):
        yield Finding(
            "old-driver",
            "error",
            f"the driver {gpus.driver} is too old for CUDA {cuda}, which needs "
            f"{needed} or newer",
            "update NVIDIA's driver, or install a build for an older CUDA",
            _COMPATIBILITY,
        )


def _kernels(facts):
    built = facts["versions"].get("built for", "").split()
    capability = facts["compute_capability"]
    numbers = [_arch(name) for name in built if name.startswith("sm_")]
    if capability is None or not numbers:
        return
    wanted = tuple(capability)
    # Kernels run on later GPUs with the same major compute capability. The
    # driver compiles PTX code, such as compute_80, for any later GPU.
    later = [_arch(n) for n in built if n.startswith("compute_")]
    runs = any(n[0] == wanted[0] and n <= wanted for n in numbers)
    if not runs and not any(n <= wanted for n in later):
        text = ".".join(map(str, wanted))
        yield Finding(
            "no-kernels",
            "error",
            f"this build of {facts['backend']} has kernels for "
            f"{' '.join(built)}, but none for compute capability {text}",
            "install a build for a newer CUDA",
            "https://github.com/pytorch/pytorch/issues/150733",
        )


def _arch(name):
    """Returns `(9, 0)` for "sm_90a", `(12, 0)` for "compute_120"."""
    digits = "".join(c for c in name.partition("_")[2] if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def _numbers(version):
    return tuple(int(n) for n in version.split(".") if n.isdigit())


@functools.cache
def entries() -> tuple[dict, ...]:
    """Returns the entries of `known_bad.toml`."""
    file = resources.files(__package__) / "known_bad.toml"
    return tuple(tomllib.loads(file.read_text())["entry"])


def _known_bad(facts):
    for entry in entries():
        if _matches(entry, facts):
            yield Finding(*(entry[field] for field in Finding._fields))


def _matches(entry, facts):
    return (
        entry.get("backend", facts["backend"]) == facts["backend"]
        and entry.get("kind", facts["kind"]) == facts["kind"]
        and _hardware_matches(entry, facts)
        and all(
            _is_version(facts["versions"].get(name), wanted)
            for name, wanted in entry.get("versions", {}).items()
        )
    )


def _hardware_matches(entry, facts):
    instructions = facts.get("instructions") or ()
    has, lacks = entry.get("has"), entry.get("lacks")
    if lacks == "tensor cores":
        return any(map(lacks_tensor_cores, facts["devices"]))
    return (not has or has in instructions) and lacks not in instructions


def _is_version(version, wanted):
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except (InvalidVersion, TypeError):
        return False
