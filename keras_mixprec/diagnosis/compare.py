"""How far a 16-bit result is from its float32 twin."""

import math
from collections.abc import Sequence

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.numerics.arrays import count_nonfinite, largest_magnitude

# Between these a sum of squares loses nothing that counts in float32.
_SQUARES = 1e-20, 1e30


def relative_error(
    low: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> float:
    """Returns `|low - exact| / |exact|` over all arrays together.

    Args:
        low: Arrays, what 16 bits gave.
        exact: Arrays of the same shapes, what float32 gave.

    Returns:
        Float >= 0; infinite if `low` has a non-finite element where `exact`
        has none. Elements where float32 is not finite do not count.
    """
    off, size = 0.0, 0.0
    for narrow, wide in zip(low, exact, strict=True):
        with np.errstate(all="ignore"):
            norms = _norm(narrow - wide), _norm(wide)
        if not math.isfinite(norms[0]):
            usable = np.isfinite(wide)
            narrow, wide = (a[usable].astype("float64") for a in (narrow, wide))
            if not np.isfinite(narrow).all():
                return math.inf
            norms = _norm(narrow - wide), _norm(wide)
        off, size = math.hypot(off, norms[0]), math.hypot(size, norms[1])
    if size == 0.0:
        return math.inf if off else 0.0
    return off / size


def repeats(again: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> bool:
    """Whether a computation in 16 bits came out the same twice.

    Args:
        again: List of arrays.
        before: List of arrays of the same shapes.
    """
    # Both ways, since what is not finite in the second does not count.
    errors = relative_error(again, before), relative_error(before, again)
    return max(errors) <= thresholds.FORWARD_ERROR


def largest(arrays: Sequence[np.ndarray]) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
    return max(map(largest_magnitude, arrays), default=0.0)


def nonfinite(arrays: Sequence[np.ndarray]) -> int:
    """Returns the number of elements that are infinite or NaN."""
    return sum(map(count_nonfinite, arrays))


def _norm(values):
    # Summed in pairs, so that float32 is precise enough. Not `np.linalg.norm`,
    # whose threads wait for each other on a busy machine: 5 ms a call.
    squares = float(np.square(values).sum())
    if not _SQUARES[0] < squares < _SQUARES[1]:
        squares = float(np.square(values, dtype="float64").sum())
    return math.sqrt(squares)
