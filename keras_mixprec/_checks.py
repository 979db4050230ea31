"""Checks arguments, and raises internal errors in strict runs."""

import math
import numbers
import os
from collections.abc import Iterable


def check_type(name, value, types, what):
    """Returns `value` if it has the right type, or raises an error.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object to check.
        types: Type or tuple of types.
        what: String. The right type in words.
    """
    if not isinstance(value, types):
        raise TypeError(
            f"`{name}` must be {what}. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )
    return value


def check_list(name, value, kind, what):
    """Returns the entries of an iterable as a list, or raises an error.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object to check. A string is refused.
        kind: Type of each entry.
        what: String. The right type in words.
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
    """Returns `value` as a float, or raises an error.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object to check. Booleans are refused, although they are
            integers in Python.
        low: Float. Smallest allowed value, inclusive.
        high: Float. Largest allowed value, inclusive.
        why: String. The reason for the limits, for the message.

    Returns:
        The value as a Python float.

    Raises:
        TypeError: If `value` is not a real number.
        ValueError: If `value` is not finite or lies outside `[low, high]`.
    """
    value = _check_number(name, value, numbers.Real, "a number")
    if not math.isfinite(value) or not low <= value <= high:
        limits = f" between {low:g} and {high:g}" if low > -math.inf else ""
        reason = f" ({why})" if why else ""
        raise ValueError(
            f"`{name}` must be a finite number{limits}{reason}. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_integer(name, value, *, low=0, high=2**31 - 1):
    """Returns `value` as an int, or raises an error.

    The default limits are 0 and the largest int32.
    """
    value = _check_number(name, value, numbers.Integral, "an integer")
    if not low <= value <= high:
        raise ValueError(
            f"`{name}` must be at least {low} and at most {high}. "
            f"Received: {name}={value!r}"
        )
    return int(value)


def check_choice(name, value, choices):
    """Returns `value` if it is one of `choices`, or raises an error."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={value!r}"
        )
    return value


def _check_number(name, value, types, what):
    # Users may pass NumPy scalars and zero-dimensional arrays as numbers.
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    # A boolean is an integer in Python, but a boolean passed as a number is
    # most likely a mistake.
    types = () if isinstance(value, bool) else types
    return check_type(name, value, types, what)


def raise_if_strict(error) -> None:
    """Raises an error in strict runs, and ignores it otherwise.

    Training continues after an error of this package. Tests set the environment
    variable `KERAS_MIXPREC_STRICT=1`, so that such errors fail the test.

    Args:
        error: Exception to raise. A string describes an expected problem and
            is always ignored.
    """
    strict = os.environ.get("KERAS_MIXPREC_STRICT") == "1"
    if strict and isinstance(error, Exception):
        raise error
