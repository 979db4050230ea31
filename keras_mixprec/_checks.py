"""Checks shared by every part: of arguments, and of errors in a strict run."""

import math
import numbers
import os


def check_number(name, value, *, low=-math.inf, high=math.inf, why=""):
    """Returns `value` as a float, or raises saying what it has to be.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object to check. Booleans are refused although Python counts
            them as integers.
        low: Float. Smallest allowed value, inclusive.
        high: Float. Largest allowed value, inclusive.
        why: String. The reason for the limits, put behind the message.

    Returns:
        The value as a Python float.

    Raises:
        TypeError: If `value` is not a real number.
        ValueError: If it is not finite or lies outside `[low, high]`.
    """
    value = _unwrap_scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )
    if not math.isfinite(value) or not low <= value <= high:
        limits = f"between {low:g} and {high:g}" if low > -math.inf else ""
        reason = f" ({why})" if why else ""
        raise ValueError(
            f"`{name}` must be a finite number {limits}{reason}. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_integer(name, value, *, low=0, high=2**31 - 1):
    """Returns `value` as an int32's worth, or raises saying what is wrong."""
    value = _unwrap_scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"`{name}` must be an integer. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )
    if not low <= value <= high:
        raise ValueError(
            f"`{name}` must be at least {low} and at most {high}. "
            f"Received: {name}={value!r}"
        )
    return int(value)


def check_choice(name, value, choices):
    """Returns `value` if it is one of `choices`, or raises listing them."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={value!r}"
        )
    return value


def _unwrap_scalar(value):
    # NumPy scalars and zero-dimensional arrays are numbers to a user.
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return value


def raise_if_strict(error) -> None:
    """Raises an error that training would go on after, if that is asked for.

    By the environment variable `KERAS_MIXPREC_STRICT=1`, so that no test passes
    over a defect.

    Args:
        error: Exception; anything else is a reason in words, and expected.
    """
    strict = os.environ.get("KERAS_MIXPREC_STRICT") == "1"
    if strict and isinstance(error, Exception):
        raise error
