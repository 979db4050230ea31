"""Setter and scope for the precision of float32 matrix products."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, overload

from keras_mixprec._checks import check_choice, check_type
from keras_mixprec.backend import active

# The names of the precisions. "default" is the backend's choice. The next names
# keep 24, 16, 11 and 8 significant bits. A float32 number has 24.
NAMES = ("default", "float32", "bfloat16_3x", "tf32", "bfloat16")

# The precisions that a backend offers on a device, besides float32. On a TPU,
# TensorFlow's switch for TF32 selects bfloat16.
_HAS = {
    ("tensorflow", "cuda"): ("tf32",),
    ("tensorflow", "tpu"): ("bfloat16",),
    ("jax", "cuda"): ("bfloat16_3x", "tf32", "bfloat16"),
    ("jax", "tpu"): ("bfloat16_3x", "bfloat16"),
    ("torch", "cuda"): ("tf32",),
}
_TF32_FROM = (8, 0)

# The default precisions of products and of convolutions, for devices where they
# are not both float32.
_DEFAULTS = {
    ("tensorflow", "cuda"): ("tf32", "tf32"),
    ("tensorflow", "tpu"): ("bfloat16", "bfloat16"),
    ("jax", "cuda"): ("tf32", "tf32"),
    ("jax", "tpu"): ("bfloat16", "bfloat16"),
    ("torch", "cuda"): ("float32", "tf32"),
}

_WORDS = {"tf32": "TF32", "bfloat16_3x": "three products of bfloat16"}
_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}


class MatmulPrecision(NamedTuple):
    """The precision of float32 products and convolutions.

    Attributes:
        products: String. The precision of matrix products, or the backend's own
            name for a setting that has no name here.
        convolutions: String. The precision of convolutions.
        is_default: Boolean, whether both are the backend's defaults.
        available: Tuple of the precisions that the device supports.
        where: String. The backend and the device.
    """

    products: str
    convolutions: str
    is_default: bool
    available: tuple
    where: str

    def __str__(self):
        words = [_WORDS.get(x, x) for x in (self.products, self.convolutions)]
        both = f"{words[0]}, convolutions in {words[1]}"
        text = words[0] if words[0] == words[1] else both
        if self.available == ("float32",):
            return f"{text} ({self.where} has no faster mode)"
        why = "the default of" if self.is_default else "set on"
        return f"{text}, {why} {self.where}"


def set_matmul_precision(name: str) -> str:
    """Sets the precision of float32 matrix products.

    Units for lower precision are several times as fast as float32 units.
    Tensors stay float32. The device rounds only the inputs of each product, and
    adds up in float32. Layers in 16 bits do not change. The setting also
    applies to convolutions, except for `"bfloat16_3x"` and `"bfloat16"` with
    JAX on a GPU.

    On TensorFlow and torch, the setting holds for the process. On JAX, it holds
    for every thread outside a `matmul_precision` scope. It also applies to
    models that are already compiled. Only your own
    `tf.function(jit_compile=True)` keeps the precision that it was compiled
    with.

    Args:
        name: String. `"float32"`, full precision; `"tf32"`, TensorFloat-32 of
            NVIDIA GPUs since Ampere; `"bfloat16_3x"`, three bfloat16 products
            in place of one; `"bfloat16"`; or `"default"`, the backend's choice.

    Returns:
        String. The name in force now, as `matmul_precision()` returns it.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If the name is unknown, or the device does not support this
            precision. The message lists the supported precisions.

    Example:
    >>> set_matmul_precision("float32")
    'float32'
    >>> _ = set_matmul_precision("default")
    """
    capabilities = active.devices()
    _check(name, capabilities)
    active.precision().put(name, capabilities["kind"])
    return in_force().products


@overload
def matmul_precision() -> str: ...


@overload
def matmul_precision(name: str) -> AbstractContextManager[str]: ...


def matmul_precision(
    name: str | None = None,
) -> str | AbstractContextManager[str]:
    """Sets the matmul precision inside a `with` block, or returns it.

    The scope restores the earlier setting at the end of the block, even after
    an exception. On JAX, a scope applies only to its thread. On TensorFlow and
    torch, it applies to all threads.

    Args:
        name: As in `set_matmul_precision`. Defaults to `None`, which sets
            nothing and returns the name in force.

    Returns:
        A context manager; `as` gives the name in force. Without `name`, a
        string: the precision of products on this device, whether you set it or
        the backend chose it.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: As in `set_matmul_precision`.

    Example:
    >>> with matmul_precision("float32"):
    ...     matmul_precision()
    'float32'
    """
    if name is None:
        return in_force().products
    # Check the name before the `with` block starts, so that an error points to
    # the line that calls `matmul_precision`.
    capabilities = active.devices()
    _check(name, capabilities)
    return _scope(name, capabilities["kind"])


def in_force() -> MatmulPrecision:
    """Returns the precision of float32 products on this device."""
    capabilities = active.devices()
    read = active.precision().read(capabilities["kind"])
    return resolve(read, capabilities)


def resolve(read: tuple[str, str], capabilities: dict) -> MatmulPrecision:
    """Returns the precision that results from settings on a device.

    Args:
        read: The settings of products and convolutions.
        capabilities: Dict, as `recommend_policy().capabilities`.
    """
    place = capabilities["backend"], capabilities["kind"]
    has = _available(capabilities)
    defaults = _DEFAULTS.get(place, ("float32", "float32"))
    named = [
        default if name == "default" else name
        for name, default in zip(read, defaults, strict=True)
    ]
    # Backends ignore a precision that the device lacks, and use float32.
    products, convolutions = (
        "float32" if name in NAMES and name not in has else name
        for name in named
    )
    is_default = read[0] == "default" or tuple(named) == defaults
    where = f"{_TITLES[place[0]]} on {_device(capabilities)}"
    return MatmulPrecision(products, convolutions, is_default, has, where)


def _available(capabilities):
    """Returns the precisions that the device supports, `"float32"` first."""
    place = capabilities["backend"], capabilities["kind"]
    has = _HAS.get(place, ())
    if place[1] == "cpu":
        has = active.precision().names_of_cpu()
    if place[1] == "cuda":
        capability = capabilities["compute_capability"]
        if capability is None or tuple(capability) < _TF32_FROM:
            has = ()
        elif os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
            # `NVIDIA_TF32_OVERRIDE` overrides all settings in NVIDIA's
            # libraries.
            has = tuple(name for name in has if name != "tf32")
    return ("float32", *has)


def computed_in(name: str) -> AbstractContextManager:
    """Sets the precision inside a `with` block, for new computations only.

    Float32 references and measurements use this scope. It does not check the
    name, and does not reach models that are already compiled.

    Args:
        name: String, `"float32"` or `"tf32"`.
    """
    return active.precision().local_scope(name)


@contextlib.contextmanager
def _scope(name, kind) -> Iterator[str]:
    with active.precision().scope(name, kind):
        yield in_force().products


def _check(name, capabilities):
    check_type("name", name, str, "the name of a matmul precision")
    check_choice("name", name, NAMES)
    has = _available(capabilities)
    if name not in ("default", *has):
        backend = _TITLES[capabilities["backend"]]
        raise ValueError(
            f"{backend} has no {name!r} products on "
            f"{_device(capabilities)}. It has {', '.join(map(repr, has))}. "
            f"Received: name={name!r}"
        )


def _device(capabilities):
    if capabilities["kind"] == "cpu":
        return "this CPU"
    return ", ".join(dict.fromkeys(capabilities["devices"]))
