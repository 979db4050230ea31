"""Recommends a policy for the hardware."""

from dataclasses import dataclass

from keras_mixprec.devices import measured as measurements
from keras_mixprec.devices.found import find_devices
from keras_mixprec.devices.native_formats import (
    Support,
    formats_of,
    lacks_tensor_cores,
)

# bfloat16 comes first, because it has float32's range and needs no loss
# scaling.
_CANDIDATES = ("bfloat16", "float16")

# The minimum speed of a recommended 16-bit format, as a multiple of float32's.
# A smaller gain may be noise, and does not make up for the lost digits.
FASTER = 1.1


@dataclass(frozen=True)
class Recommendation:
    """The policy that suits the devices at hand, and why.

    Attributes:
        policy: String. `"mixed_bfloat16"`, `"mixed_float16"` or `"float32"`.
        reason: String. One sentence.
        device: String. The names of the devices.
        capabilities: Dict with `backend`, `version`, `keras`, `kind`,
            `devices`, `compute_capability`, `architecture`, `instructions` and
            `measured`. The last one is `None`, or a dict with the measurements
            of `doctor` on this device: `speed` (dict of format to speed, as a
            multiple of float32's), `wrong` (formats with wrong results), `date`
            and `quick`.

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

    It recommends bfloat16 on devices where bfloat16 is fast, because bfloat16
    has float32's range and needs no loss scaling. It recommends float16 on GPUs
    without fast bfloat16, and float32 on devices that gain nothing from 16
    bits, such as the GTX 16 series, which has no tensor cores. The oldest of
    several GPUs decides.

    It measures nothing and takes milliseconds. On CPUs and Apple's GPUs the
    gain depends on the backend. There it uses measurements that `doctor` made
    on the same devices with the same versions, and the reason says so. Without
    measurements it recommends float32. It never recommends a format in which
    `doctor` found wrong results.

    On JAX this initializes the backend. In a job of several processes, call
    `jax.distributed.initialize()` first.

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
    known = measurements.load(found)
    return {**found, "measured": known._asdict() if known else None}


def recommend(capabilities: dict) -> Recommendation:
    """Returns the recommendation for given capabilities.

    Args:
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    wrong = (capabilities.get("measured") or {}).get("wrong", ())
    right = [format for format in _CANDIDATES if format not in wrong]
    judged = {format: _is_fast(format, capabilities) for format in right}
    fast = [format for format in right if judged[format][0]]
    if fast:
        policy, reason = f"mixed_{fast[0]}", judged[fast[0]][1]
    elif len(right) < len(_CANDIDATES):
        found = " and ".join(wrong)
        policy, reason = (
            "float32",
            f"doctor found wrong results in {found} here",
        )
    else:
        # Give the reason against the format that users would try first:
        # float16 on CUDA GPUs, and bfloat16 on all other devices.
        is_cuda = capabilities["compute_capability"] is not None
        policy, reason = "float32", judged[_CANDIDATES[is_cuda]][1]
    device = ", ".join(dict.fromkeys(capabilities["devices"]))
    return Recommendation(policy, reason, device, capabilities)


def slow_because(policy: str, capabilities: dict) -> str:
    """Returns why a policy is not faster than float32 on a device, or `""`.

    Args:
        policy: String. A policy name.
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    format = policy.removeprefix("mixed_")
    if format not in _CANDIDATES:
        return ""
    fast, reason = _is_fast(format, capabilities)
    return reason if fast is False else ""


def formats(capabilities: dict) -> dict[str, Support]:
    """Returns how the devices support each format.

    The oldest of several devices decides.

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


def _is_fast(format, capabilities):
    """Returns whether a format beats float32 (`None` if unknown), and why."""
    if without := _without_tensor_cores(capabilities):
        return False, f"{without} has no tensor cores"
    support = formats(capabilities)[format]
    if support.matrix:
        return True, f"it has {support.note}"
    if support.status == "emulated":
        return False, f"{format} is emulated here ({support.note})"
    measured = capabilities.get("measured") or {}
    speed = measured.get("speed", {}).get(format)
    if speed is not None:
        return speed >= FASTER, (
            f"doctor measured {format} training at {speed:.2f} times float32's "
            f"speed here on {measured['date']}"
        )
    if support.status == "unknown":
        # A CPU that does not report its instructions is assumed to be slow.
        return None if capabilities["kind"] != "cpu" else False, (
            "the device does not report its 16-bit formats; run "
            "`keras-mixprec doctor` to measure them"
        )
    if capabilities["compute_capability"] is not None:
        return False, f"the device has {support.note}"
    return None, (
        f"it has {support.note}, but the gain depends on the backend; run "
        "`keras-mixprec doctor` to measure it"
    )


def _without_tensor_cores(capabilities):
    """Returns the first device known to lack tensor cores, or `""`."""
    if capabilities["compute_capability"] is None:
        return ""
    names = capabilities["devices"]
    return next((n for n in names if lacks_tensor_cores(n)), "")
