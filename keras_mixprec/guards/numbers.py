"""Numbers that take the place of others in logs and results of metrics."""

import functools
import math

from keras import ops


def unless(condition, instead, result):
    """Another `result`, with a number instead where the condition holds."""

    @functools.wraps(result)
    def guarded(*args, **kwargs):
        value = result(*args, **kwargs)
        if not _is_float_tensor(value):
            return value
        return ops.where(condition(), ops.cast(instead(), value.dtype), value)

    return guarded


def nan_where(lost, value):
    """Returns NaN where weights were lost, if `value` is a float tensor."""
    if not _is_float_tensor(value):
        return value
    return ops.where(
        ops.greater(lost, 0), ops.cast(math.nan, value.dtype), value
    )


def is_number(value) -> bool:
    """Returns whether a step may have logged it as a loss."""
    return isinstance(value, float) or _is_float_tensor(value)


def _is_float_tensor(value):
    return ops.is_tensor(value) and "float" in str(value.dtype)
