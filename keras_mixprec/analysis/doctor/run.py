"""`doctor`: what the machine can do in 16 bits."""

import importlib
import sys

from keras_mixprec._checks import check_choice
from keras_mixprec.analysis.doctor.process import run_in_process
from keras_mixprec.analysis.doctor.report import DoctorReport

BACKENDS = ("tensorflow", "jax", "torch")


def doctor(backend: str | None = None, quick: bool = False) -> DoctorReport:
    """Examines and measures what 16 bits bring on this machine.

    It lists the devices, which number formats these have units for, versions
    and combinations of them that are known to be bad; compares the results of
    each format with float64; and times products, convolutions and the training
    of a transformer block in each format against float32. What it measures is
    kept, so that `recommend_policy`, and with it `"auto"`, can go by it.

    The active backend is examined in this process, on its default devices,
    which it initializes; another one, and one that cannot be imported, in a
    process of its own. Nothing else is changed: no policy, no random seed.

    Args:
        backend: String. `"tensorflow"`, `"jax"` or `"torch"`. Defaults to
            `None`: the one that Keras uses.
        quick: Boolean. Whether to take seconds rather than half a minute: one
            size of each operation, no format that is emulated. Defaults to
            `False`.

    Returns:
        A `DoctorReport`: `print` it, show it in a notebook, or take its
        attributes, such as `findings` and `recommendation`, or `to_dict()`.
        A backend that is missing or broken is one of its findings.

    Raises:
        ValueError: If there is no such backend.
        TypeError: If `quick` is no boolean.

    Example:
    >>> report = doctor(quick=True)
    >>> report.recommendation["policy"] == recommend_policy().policy
    True
    """
    if backend is not None:
        check_choice("backend", backend, BACKENDS)
    if not isinstance(quick, bool):
        raise TypeError(
            "`quick` must be a boolean. "
            f"Received: quick={quick!r} of type {type(quick).__name__}"
        )
    keras = _keras()
    if keras is None or backend not in (None, keras.backend.backend()):
        say = show if keras is None else _say_as(keras)
        return run_in_process(backend, quick, say)
    examine = importlib.import_module(f"{__package__}.examine").examine
    return examine(quick, _say_as(keras))


def show(line: str) -> None:
    """Shows a line of progress, on stderr."""
    print(f"doctor: {line} ...", file=sys.stderr, flush=True)


def _keras():
    """Keras, `None` if its backend cannot be imported."""
    try:
        return importlib.import_module("keras")
    except Exception:
        return None


def _say_as(keras):
    interactive = keras.config.is_interactive_logging_enabled()
    return show if interactive else lambda line: None
