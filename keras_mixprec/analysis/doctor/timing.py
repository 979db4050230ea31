"""Timing of functions against each other: interleaved, medians of pairs.

Knows neither Keras nor a backend: functions in, seconds out.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from keras_mixprec import _clock

# Of a function that is this much slower than the first one call is enough to
# say so; a median of many would take the time of all others together.
SLOW = 20.0

_ROUNDS = 3, 40

# Long enough that the clock, and what starts a call, take less than 1%.
_SAMPLE = 0.005


class Timing(NamedTuple):
    """How long functions take.

    Attributes:
        seconds: Float, of a call of the first: a median.
        ratios: Dict from the name of each other to how many times as fast it
            is as the first: the median of the ratios of neighbours.
        errors: Dict from the name of each that failed to why.
    """

    seconds: float
    ratios: dict[str, float]
    errors: dict[str, str]


def compare(
    functions: Mapping[str, Callable],
    seconds: float,
    clock: Callable = lambda: _clock.now(),
) -> Timing:
    """Returns how long functions take, compared with the first.

    They take turns, in an order that is reversed each time, so that a machine
    that slows down slows all of them down; each round gives a ratio, and the
    median of these is what counts. The first call of each, which compiles, is
    left out.

    Args:
        functions: Dict from names to functions without arguments, each of
            which waits for its result. The first must not fail.
        seconds: Float. How long to go on; three rounds are taken anyway.
        clock: Function that returns seconds.
    """
    first = next(iter(functions))
    once, errors = {}, {}
    for name, function in functions.items():
        try:
            function()
            once[name] = _time(function, 1, clock)
        except Exception as error:
            if name == first:
                raise
            errors[name] = first_line(error)
    steady = {n: t for n, t in once.items() if t <= SLOW * once[first]}
    samples = _rounds({n: functions[n] for n in steady}, once, seconds, clock)
    ratios = {n: once[first] / t for n, t in once.items() if n not in steady}
    for name in samples.keys() - {first}:
        pairs = zip(samples[first], samples[name], strict=True)
        ratios[name] = statistics.median(a / b for a, b in pairs)
    return Timing(statistics.median(samples[first]), ratios, errors)


def first_line(error: Exception) -> str:
    """Returns an error in one line, for a table."""
    text = str(error).strip() or repr(error)
    line = text.splitlines()[0]
    return f"{type(error).__name__}: {line[:160]}"


def _rounds(functions, once, seconds, clock):
    calls = {n: max(1, round(_SAMPLE / max(once[n], 1e-6))) for n in functions}
    samples = {name: [] for name in functions}
    start = clock()
    for number in range(_ROUNDS[1]):
        if number >= _ROUNDS[0] and clock() - start >= seconds:
            break
        order = list(functions)
        for name in reversed(order) if number % 2 else order:
            samples[name].append(_time(functions[name], calls[name], clock))
    return samples


def _time(function, calls, clock):
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls
