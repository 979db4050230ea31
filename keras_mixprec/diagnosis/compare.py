"""How far a 16-bit result is from its float32 twin."""

import math
from collections.abc import Sequence

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.numerics.arrays import largest_magnitude


def relative_error(
    low: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> float:
    """Returns `|low - exact| / |exact|` over all arrays together.

    Args:
        low: Float64 arrays, what 16 bits gave.
        exact: Float64 arrays of the same shapes, what float32 gave.

    Returns:
        Float >= 0; infinite if `low` has a non-finite element where `exact`
        has none. Elements where float32 is not finite do not count.
    """
    off, size = 0.0, 0.0
    for narrow, wide in zip(low, exact, strict=True):
        usable = np.isfinite(wide)
        if not np.isfinite(narrow[usable]).all():
            return math.inf
        off = math.hypot(off, _norm(narrow[usable] - wide[usable]))
        size = math.hypot(size, _norm(wide[usable]))
    if size == 0.0:
        return math.inf if off else 0.0
    return off / size


def repeats(again: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> bool:
    """Whether a computation in 16 bits came out the same twice.

    Args:
        again: Float64 arrays.
        before: Float64 arrays of the same shapes.
    """
    # Both ways, since what is not finite in the second does not count.
    errors = relative_error(again, before), relative_error(before, again)
    return max(errors) <= thresholds.FORWARD_ERROR


def largest(arrays: Sequence[np.ndarray]) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
    return max(map(largest_magnitude, arrays), default=0.0)


def nonfinite(arrays: Sequence[np.ndarray]) -> int:
    """Returns the number of elements that are infinite or NaN."""
    return sum(int((~np.isfinite(a)).sum()) for a in arrays)


def _norm(values):
    return float(np.linalg.norm(values.ravel()))
