"""Which policy suits the hardware: capabilities in, recommendation out."""

import re
from dataclasses import dataclass

from keras_mixprec.backend import active

# Tensor cores: float16 since Volta, bfloat16 since Ampere.
_FLOAT16_FROM = (7, 0)
_BFLOAT16_FROM = (8, 0)

# Turing chips without them (TU116, TU117), whose capability is 7.5 like that
# of those that have them: GTX 16 series, MX450 and MX550, Quadro T series
# (not the Tesla T4), CMP 30HX.
_NO_TENSOR_CORES = re.compile(
    r"\b(GTX 16\d\d|MX[45]50|T(400|5[05]0|600|1000|1200|2000)|CMP 30HX)\b"
)

_WITHOUT_CAPABILITY = {
    "tpu": ("mixed_bfloat16", "TPUs multiply in bfloat16"),
    "xpu": ("mixed_bfloat16", "Intel GPUs multiply bfloat16 in XMX engines"),
    "cpu": (
        "float32",
        "CPUs compute float16 no faster, and whether a backend uses a CPU's "
        "bfloat16 instructions cannot be queried",
    ),
    "mps": (
        "float32",
        "16-bit training on Apple GPUs is not known to be faster in Keras",
    ),
    "rocm": (
        "float32",
        "AMD GPUs differ in their 16-bit units and do not report them; "
        'set "mixed_bfloat16" by hand on an MI200 or newer',
    ),
}


@dataclass(frozen=True)
class Recommendation:
    """The policy that suits the devices at hand, and why.

    Attributes:
        policy: String. `"mixed_bfloat16"`, `"mixed_float16"` or `"float32"`.
        reason: String. One sentence.
        device: String. The device it was made for.
        capabilities: Dict. What was found: `backend`, `kind`, `devices`,
            `compute_capability`.

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

    bfloat16 wherever it is fast, because it has float32's range and needs no
    loss scaling; float16 on GPUs that have nothing faster than that; float32
    where 16 bits bring nothing, such as the GTX 16 series, which has no tensor
    cores. Of several GPUs the oldest decides.

    On JAX this initializes the backend, so call
    `jax.distributed.initialize()` first in a job of several processes.

    Returns:
        A `Recommendation`.

    Example:
    >>> recommendation = recommend_policy()
    >>> recommendation.capabilities["backend"] == keras.backend.backend()
    True
    """
    return recommend(active.devices())


def recommend(capabilities: dict) -> Recommendation:
    """Returns what to recommend for given capabilities.

    Args:
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    device = ", ".join(dict.fromkeys(capabilities["devices"]))
    capability = capabilities["compute_capability"]
    if without := _without_tensor_cores(capabilities):
        policy, reason = "float32", f"{without} has no tensor cores"
    elif capability is not None:
        policy, reason = _judge_cuda(tuple(capability))
    else:
        policy, reason = _WITHOUT_CAPABILITY.get(
            capabilities["kind"],
            ("float32", "nothing is known of this device's 16-bit speed"),
        )
    return Recommendation(policy, reason, device, capabilities)


def slow_because(policy: str, capabilities: dict) -> str:
    """Returns why a policy brings no speed on a device, or `""`.

    Args:
        policy: String. A policy name.
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    if not policy.endswith("float16"):
        return ""
    if capabilities["kind"] == "cpu":
        return "on a CPU it is usually no faster than float32"
    if without := _without_tensor_cores(capabilities):
        return f"{without} has no tensor cores, which make it faster"
    capability = capabilities["compute_capability"]
    bfloat16 = policy.endswith("bfloat16")
    needed = _BFLOAT16_FROM if bfloat16 else _FLOAT16_FROM
    if capability is None or tuple(capability) >= needed:
        return ""
    return (
        f"it needs a GPU of compute capability {_text(needed)} or higher to "
        f"be faster than float32, and this one has {_text(capability)}"
    )


def _without_tensor_cores(capabilities):
    """The first device without them, `""` if none is known to be one."""
    if capabilities["compute_capability"] is None:
        return ""
    names = capabilities["devices"]
    return next((n for n in names if _NO_TENSOR_CORES.search(n)), "")


def _judge_cuda(capability):
    has = f"compute capability {_text(capability)}"
    if capability >= _BFLOAT16_FROM:
        return "mixed_bfloat16", f"{has} has bfloat16 tensor cores"
    if capability >= _FLOAT16_FROM:
        return "mixed_float16", f"{has} has float16 tensor cores, no bfloat16"
    return "float32", f"{has} has no tensor cores, which start at 7.0"


def _text(capability):
    return ".".join(map(str, capability))
