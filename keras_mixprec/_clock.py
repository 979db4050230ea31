"""The only clock of the package, which tests replace."""

import time


def now() -> float:
    """Returns seconds since an arbitrary start."""
    return time.perf_counter()


def wall() -> float:
    """Returns the time of day, in seconds since 1970."""
    return time.time()
