"""Which policy suits the hardware: capabilities in, recommendation out."""

from dataclasses import dataclass

from keras_mixprec.devices import measured
from keras_mixprec.devices.found import find_devices
from keras_mixprec.devices.native_formats import (
    Support,
    formats_of,
    lacks_tensor_cores,
)

# bfloat16 first: it has float32's range and needs no loss scaling.
_CANDIDATES = ("bfloat16", "float16")

# A format counts as faster than float32 from here on. A smaller gain may be
# noise, and is not worth the digits.
FASTER = 1.1


@dataclass(frozen=True)
class Recommendation:
    """The policy that suits the devices at hand, and why.

    Attributes:
        policy: String. `"mixed_bfloat16"`, `"mixed_float16"` or `"float32"`.
        reason: String. One sentence.
        device: String. The device it was made for.
        capabilities: Dict, what was found: `backend`, `version`, `keras`,
            `kind`, `devices`, `compute_capability`, `architecture`,
            `instructions`, and `measured`, a dict of what `doctor` measured
            there: `speed` (a format's, as a multiple of float32's), `wrong`
            (formats with wrong results), `date` and `quick`; `None` if nothing
            was measured.

    Example:
    >>> recommend_policy().policy in (
    ...     "float32", "mixed_float16", "mixed_bfloat16")
    True
    """

    policy: str
    reason: str
    device: str
    capabilities: dict

    def __str__(self):
        return f"{self.policy} on {self.device}: {self.reason}"


def recommend_policy() -> Recommendation:
    """Returns the policy that suits the devices of the active backend.

    It recommends bfloat16 wherever that is fast, because it has float32's range
    and needs no loss scaling. Float16 is for GPUs without fast bfloat16.
    Float32 is for devices on which 16 bits bring nothing, such as the GTX 16
    series, which has no tensor cores. The oldest of several GPUs decides.

    It measures nothing, and takes milliseconds. On CPUs, Apple's GPUs and
    others, the gain depends on the backend. There it relies on what `doctor`
    measured on the same devices with the same versions, and says so. Without a
    measurement it recommends float32. It never recommends a format if `doctor`
    found wrong results in it.

    On JAX this initializes the backend, so call
    `jax.distributed.initialize()` first in a job of several processes.

    Returns:
        A `Recommendation`.

    Example:
    >>> recommendation = recommend_policy()
    >>> recommendation.capabilities["backend"] == keras.backend.backend()
    True
    """
    return recommend(find_capabilities())


def find_capabilities() -> dict:
    """Returns the active backend's capabilities and measurements."""
    found = find_devices()
    known = measured.load(found)
    return {**found, "measured": known._asdict() if known else None}


def recommend(capabilities: dict) -> Recommendation:
    """Returns what to recommend for given capabilities.

    Args:
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    device = ", ".join(dict.fromkeys(capabilities["devices"]))
    policy, reason = _judge(capabilities)
    return Recommendation(policy, reason, device, capabilities)


def slow_because(policy: str, capabilities: dict) -> str:
    """Returns why a policy brings no speed on a device, or `""`.

    Args:
        policy: String. A policy name.
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    if not policy.endswith("float16"):
        return ""
    format = policy.removeprefix("mixed_")
    support = formats(capabilities)[format]
    is_cpu = capabilities["kind"] == "cpu"
    if without := _without_tensor_cores(capabilities):
        return f"{without} has no tensor cores, which make it faster"
    if support.matrix or (support.status == "unknown" and not is_cpu):
        return ""
    speed = _speed(capabilities, format)
    known_native = (
        support.status == "native" and not capabilities["compute_capability"]
    )
    if known_native if speed is None else speed >= FASTER:
        return ""
    return _why_slow(format, capabilities)


def formats(capabilities: dict) -> dict[str, Support]:
    """Returns what the devices make of each format, the oldest of several.

    Args:
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    return formats_of(
        capabilities["kind"],
        _without_tensor_cores(capabilities) or capabilities["devices"][0],
        capabilities["compute_capability"],
        capabilities.get("architecture", ""),
        capabilities.get("instructions"),
    )


def _judge(capabilities):
    """The policy, and why."""
    if without := _without_tensor_cores(capabilities):
        return "float32", f"{without} has no tensor cores"
    support = formats(capabilities)
    wrong = (capabilities.get("measured") or {}).get("wrong", ())
    right = [format for format in _CANDIDATES if format not in wrong]
    for format in right:
        if support[format].matrix:
            return f"mixed_{format}", f"it has {support[format].note}"
    for format in right:
        speed = _speed(capabilities, format)
        if support[format].status != "emulated" and (speed or 0) >= FASTER:
            return f"mixed_{format}", _measured_text(capabilities, format)
    if len(right) < len(_CANDIDATES):
        found = " and ".join(wrong)
        return "float32", f"doctor found wrong results in {found} here"
    # CUDA devices had float16 first, others bfloat16.
    is_cuda = capabilities["compute_capability"] is not None
    return "float32", _why_slow(_CANDIDATES[is_cuda], capabilities)


def _why_slow(format, capabilities):
    support = formats(capabilities)[format]
    if _speed(capabilities, format) is not None:
        return _measured_text(capabilities, format)
    if support.status == "emulated":
        return f"{format} is emulated here ({support.note})"
    if support.status == "unknown":
        return (
            "the device does not report its 16-bit formats; run "
            "`keras-mixprec doctor` to measure them"
        )
    if capabilities["compute_capability"] is not None:
        return f"the device has {support.note}"
    return (
        f"it has {support.note}, but how fast that is differs by backend: "
        "`keras-mixprec doctor` measures it"
    )


def _speed(capabilities, format):
    known = capabilities.get("measured") or {}
    return known.get("speed", {}).get(format)


def _measured_text(capabilities, format):
    speed = _speed(capabilities, format)
    return (
        f"doctor measured {format} training at {speed:.2f} times float32's "
        f"speed here on {capabilities['measured']['date']}"
    )


def _without_tensor_cores(capabilities):
    """The first device without them, `""` if none is known to be one."""
    if capabilities["compute_capability"] is None:
        return ""
    names = capabilities["devices"]
    return next((n for n in names if lacks_tensor_cores(n)), "")
