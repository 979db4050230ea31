"""Checks shared by every part: of arguments, and of errors in a strict run."""

import math
import numbers
import os
from collections.abc import Iterable


def check_type(name, value, types, what):
    """Returns `value` if it is of a type, or raises saying what it has to be.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object to check.
        types: Type or tuple of types.
        what: String, what it has to be, in words.
    """
    if not isinstance(value, types):
        raise TypeError(
            f"`{name}` must be {what}. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )
    return value


def check_list(name, value, kind, what):
    """Returns a list of an iterable's entries, or raises saying what is wrong.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object to check. A string is not a list of its letters.
        kind: Type of each entry.
        what: String, what it has to be, in words.
    """
    iterable = () if isinstance(value, str) else Iterable
    entries = [*check_type(name, value, iterable, what)]
    for place, entry in enumerate(entries):
        if not isinstance(entry, kind):
            raise TypeError(
                f"`{name}` must be {what}. Received: {name}[{place}]={entry!r}"
            )
    return entries


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
    value = _check_no_boolean(name, value, numbers.Real, "a number")
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
    value = _check_no_boolean(name, value, numbers.Integral, "an integer")
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


def _check_no_boolean(name, value, types, what):
    # Python counts booleans as integers.
    types = () if isinstance(value, bool) else types
    return check_type(name, value, types, what)


def _unwrap_scalar(value):
    # NumPy scalars and zero-dimensional arrays are numbers to a user.
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return value


def raise_if_strict(error) -> None:
    """Raises an error in a strict run; otherwise training goes on after it.

    The environment variable `KERAS_MIXPREC_STRICT=1` asks for it, so that no
    test hides a defect.

    Args:
        error: Exception; anything else is a reason in words, and expected.
    """
    strict = os.environ.get("KERAS_MIXPREC_STRICT") == "1"
    if strict and isinstance(error, Exception):
        raise error
