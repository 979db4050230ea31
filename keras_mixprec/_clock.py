"""The only clock of the package. Tests replace it."""

import time


def now() -> float:
    """Returns seconds since an arbitrary start."""
    return time.perf_counter()


def wall() -> float:
    """Returns the Unix time, in seconds."""
    return time.time()
