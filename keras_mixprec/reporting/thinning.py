"""Fewer and fewer rows of an endless run, without losing what is rare."""

import numpy as np

# What a run of a million steps, probed every 100, comes to with 500 rows at
# each interval: 2,156 rows of 10,000. TensorBoard holds them in memory.
ROWS_PER_INTERVAL = 500

_POOLS = {"min": np.fmin, "max": np.fmax}


class Thinning:
    """Says which of an endless series of rows to write.

    All at first; every second once `rows` were written, every fourth once
    as many more were, and so on, so that the series grows with the logarithm
    of the run.

    Args:
        rows: Int. Rows at each interval. Defaults to `500`.

    Example:
    >>> from keras_mixprec.reporting.thinning import Thinning
    >>> thinning = Thinning(rows=2)
    >>> [n for n in range(14) if thinning.due()]
    [0, 1, 3, 5, 9, 13]
    """

    def __init__(self, rows: int = ROWS_PER_INTERVAL):
        self._rows = rows
        self._interval = 1
        self._waited = self._written = 0

    def due(self) -> bool:
        """Whether to write the next row; call it once for each."""
        self._waited += 1
        if self._waited < self._interval:
            return False
        self._waited = 0
        self._written += 1
        if self._written == self._rows:
            self._written = 0
            self._interval *= 2
        return True


def pooled(pool: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the worse of two arrays' elements, numbers before NaNs.

    Args:
        pool: String. `"min"` or `"max"`, whichever is the worse.
        first: Array.
        second: Array of the same shape.
    """
    return _POOLS[pool](first, second)


def pool_groups(pool: str, rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the worst of each group of rows, the last maybe a shorter one.

    Args:
        pool: As for `pooled`.
        rows: Array `[n, ...]`, n >= 1.
        size: Int >= 1. Rows of a group.
    """
    starts = np.arange(0, len(rows), size)
    return _POOLS[pool].reduceat(rows, starts, axis=0)
