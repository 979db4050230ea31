"""The one clock of the package, in whose place tests put another."""

import time


def now() -> float:
    """Returns seconds from some start on; only differences mean something."""
    return time.perf_counter()


def wall() -> float:
    """Returns the time of day, in seconds since 1970."""
    return time.time()
