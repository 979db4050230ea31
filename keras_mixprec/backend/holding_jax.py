"""Letting variables hold other arrays for a while, on JAX."""

import contextlib


@contextlib.contextmanager
def holding(variables, values):
    """Context in which variables have other values.

    Args:
        variables: List of `keras.Variable`s.
        values: List of as many arrays. They are not copied.
    """
    before = [v._value for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._value = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value
