"""Compares the speed of functions on a machine that may be busy."""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from keras_mixprec import _clock
from keras_mixprec._console import one_line

# The minimum and the maximum number of rounds.
_ROUNDS = 3, 40

# The length of a sample in seconds. At this length, reading the clock and
# calling the function add less than 1%.
_SAMPLE = 0.005


class Timing(NamedTuple):
    """The result of `compare`.

    Attributes:
        seconds: Float. Median time of a call to the first function.
        ratios: Dict from the name of each other function to its speed as a
            multiple of the first function's.
        errors: Dict from the name of each function that failed to its error.
        rounds: Int. The number of rounds.
    """

    seconds: float
    ratios: dict[str, float]
    errors: dict[str, str]
    rounds: int


def compare(functions: Mapping[str, Callable], seconds: float) -> Timing:
    """Times functions and compares them with the first.

    The functions take turns, and each round reverses their order, so a busy
    machine slows down all of them. The result is the median of the ratios of
    all rounds. The first call to each function compiles it and is left out.

    Args:
        functions: Dict from names to functions without arguments. Each must
            wait for its result, and the first must not fail.
        seconds: Float. The time for all rounds, of which there are at least
            three.
    """
    first = next(iter(functions))
    calls, errors = {}, {}
    for name, function in functions.items():
        try:
            function()
            taken = max(seconds_of(function), 1e-6)
            calls[name] = max(1, round(_SAMPLE / taken))
        except Exception as error:
            if name == first:
                raise
            errors[name] = one_line(error)
    samples: dict[str, list] = {name: [] for name in calls}
    start = _clock.now()
    for number in range(_ROUNDS[1]):
        if number >= _ROUNDS[0] and _clock.now() - start >= seconds:
            break
        order = list(calls)
        for name in reversed(order) if number % 2 else order:
            samples[name].append(seconds_of(functions[name], calls[name]))
    base = samples.pop(first)
    ratios = {
        name: statistics.median(a / b for a, b in zip(base, own, strict=True))
        for name, own in samples.items()
    }
    return Timing(statistics.median(base), ratios, errors, len(base))


def seconds_of(function: Callable, calls: int = 1) -> float:
    """Returns the mean seconds per call.

    Args:
        function: Function without arguments.
        calls: Int. The number of calls. Defaults to `1`.
    """
    start = _clock.now()
    for _ in range(calls):
        function()
    return (_clock.now() - start) / calls
