"""The one clock of the package, which tests set."""

import contextlib
import time
from collections.abc import Callable, Iterator

_steady: Callable[[], float] = time.perf_counter
_of_day: Callable[[], float] = time.time


def now() -> float:
    """Returns seconds from some start on; only differences mean something."""
    return _steady()


def wall() -> float:
    """Returns the time of day, in seconds since 1970."""
    return _of_day()


@contextlib.contextmanager
def set_to(
    steady: Callable[[], float] | None = None,
    of_day: Callable[[], float] | None = None,
) -> Iterator[None]:
    """Context in which all of the package reads another clock, for tests.

    Args:
        steady: Function without arguments, for `now`. Defaults to `None`, as
            it is.
        of_day: Function without arguments, for `wall`. Defaults to `None`.
    """
    global _steady, _of_day
    before = _steady, _of_day
    _steady, _of_day = steady or _steady, of_day or _of_day
    try:
        yield
    finally:
        _steady, _of_day = before
