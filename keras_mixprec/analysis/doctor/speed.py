"""What each format brings: the table of speeds against float32's."""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from keras_mixprec import _clock
from keras_mixprec._console import one_line
from keras_mixprec.analysis.doctor import workloads
from keras_mixprec.backend import active

# A format that was slower than this, as a multiple of float32's speed, is left
# out where a call would take longer than a second by that: float16 takes 100
# times as long on many CPUs.
_SLOW = 0.5

# What two cores of a CPU, and a GPU, take some tens of milliseconds for.
_ON_CPU = {
    "matmul": (256, 512, 1024, 1536),
    "convolution": (8, 16, (32, 64, 128, 256)),
    "block": (8, 32, 512),
}
_ELSEWHERE = {
    "matmul": (1024, 2048, 4096, 8192),
    "convolution": (32, 56, (64, 128, 256, 512)),
    "block": (16, 256, 1024),
}
_TRAINING = ("block", "feed-forward")

# Least and most rounds of calls that take turns.
_ROUNDS = 3, 40

# Long enough that the clock, and what starts a call, take less than 1%.
_SAMPLE = 0.005


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        operation: String: `"matmul"`, `"convolution"`, `"feed-forward"` or
            `"block"`, forward and backward; the last two with an update.
        size: String.
        mode: String. How it ran: `"XLA"`, `"graph"` or `"eager"`.
        seconds: Float, in float32; `None` if that failed.
        ratios: Dict from a format to how many times as fast as float32 it is.
        left_out: Dict from a format to why there is no ratio.
    """

    operation: str
    size: str
    mode: str
    seconds: float | None
    ratios: dict
    left_out: dict


def measure_speed(
    kind: str,
    formats: list[str],
    quick: bool,
    say: Callable = lambda line: None,
) -> list[Row]:
    """Returns the rows of the table.

    Args:
        kind: String, of the default devices.
        formats: List of strings, `"float32"` first.
        quick: Boolean. Whether to take one size of each, and of the block its
            feed-forward half: attention takes seconds to compile.
        say: Function that shows a line of progress.
    """
    slowest = dict.fromkeys(formats, 1.0)
    rows = []
    for operation, size, mode, workload in _plan(kind, quick):
        say(f"{operation} {size}, {mode}")
        steps = {f: _Step(f, workload, mode) for f in formats}
        try:
            # After the first call has compiled: others may take longer.
            steps["float32"]()
            seconds = _time(steps["float32"])
        except Exception as error:  # Such as too little memory.
            why = {"float32": one_line(error)}
            rows.append(Row(operation, size, mode, None, {}, why))
            continue
        slow = [
            f
            for f, ratio in slowest.items()
            if ratio < _SLOW and seconds > ratio
        ]
        tried = {f: steps[f] for f in formats if f not in slow}
        found = compare(tried, 0.3 if quick else 1.2)
        why = {f: f"{1 / slowest[f]:.0f} times as slow before" for f in slow}
        left_out = why | found.errors
        rows.append(Row(operation, size, mode, *found[:2], left_out))
        for format, ratio in found.ratios.items():
            slowest[format] = min(slowest[format], ratio)
    return rows


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


def compare(functions: Mapping[str, Callable], seconds: float) -> Timing:
    """Returns how long functions take, compared with the first.

    They take turns, in an order that is reversed each time, so that a machine
    that slows down slows all of them down; each round gives a ratio, and the
    median of these is what counts. The first call of each, which compiles, is
    left out.

    Args:
        functions: Dict from names to functions without arguments, each of
            which waits for its result. The first must not fail.
        seconds: Float. How long to go on; three rounds are taken anyway.
    """
    first = next(iter(functions))
    calls, errors = {}, {}
    for name, function in functions.items():
        try:
            function()
            calls[name] = max(1, round(_SAMPLE / max(_time(function), 1e-6)))
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
            samples[name].append(_time(functions[name], calls[name]))
    base = samples.pop(first)
    ratios = {
        name: statistics.median(a / b for a, b in zip(base, own, strict=True))
        for name, own in samples.items()
    }
    return Timing(statistics.median(base), ratios, errors)


def _time(function, calls=1):
    start = _clock.now()
    for _ in range(calls):
        function()
    return (_clock.now() - start) / calls


def training_speed(rows: list[Row]) -> dict[str, float]:
    """Returns the ratios of training, run as `fit` runs it by default."""
    trained = (row.ratios for row in rows if row.operation in _TRAINING)
    return next(trained, {})


class _Step:
    """One training step in a format, made when it is first called."""

    def __init__(self, format, workload, mode):
        self._format = format
        self._dtype = "float32" if format == "tf32" else format
        self._workload, self._mode = workload, mode
        self._run = None

    def __call__(self):
        with workloads.products_in(self._format):
            if self._run is None:
                self._run = workloads.training_step(
                    *self._workload, self._dtype, self._mode
                )
            return self._run()


def _plan(kind, quick):
    """Yields operation, size, mode and workload."""
    sizes = _ON_CPU if kind == "cpu" else _ELSEWHERE
    mode = active.runtime().MODES[0]  # What `fit` uses by default.
    some = slice(1, 2) if quick else slice(None)
    for n in sizes["matmul"][some]:
        yield "matmul", f"{n} x {n}", mode, workloads.matmul(n)
    count, height, channels = sizes["convolution"]
    for n in channels[some]:
        size = f"{count} x {height} x {height} x {n}"
        given = workloads.convolution(count, height, n)
        yield "convolution", size, mode, given
    batch, length, width = sizes["block"]
    given = workloads.block(batch, length, width, attention=not quick)
    yield _TRAINING[quick], f"{batch} x {length} x {width}", mode, given
