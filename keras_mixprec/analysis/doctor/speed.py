"""What each format brings: the table of speeds against float32's."""

from collections.abc import Callable
from typing import NamedTuple

from keras_mixprec import _clock
from keras_mixprec.analysis.doctor import workloads
from keras_mixprec.analysis.doctor.known_bad import Finding
from keras_mixprec.analysis.doctor.timing import compare, first_line
from keras_mixprec.backend import active

# A format is left out where a call would take longer than this, in seconds, by
# how slow it was before: float16 takes 100 times as long on many CPUs.
_LONGEST = 1.0

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
# A mode that takes this much less time than the default is worth a line.
_MODE = 1.25

_TRAINING = ("block", "feed-forward")


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
            seconds = _second_call(steps["float32"])
        except Exception as error:  # Such as too little memory.
            why = {"float32": first_line(error)}
            rows.append(Row(operation, size, mode, None, {}, why))
            continue
        slow = [f for f in formats[1:] if seconds > _LONGEST * slowest[f]]
        tried = {f: steps[f] for f in formats if f not in slow}
        found = compare(tried, 0.3 if quick else 1.2)
        why = {f: f"{1 / slowest[f]:.0f} times as slow before" for f in slow}
        left_out = why | found.errors
        rows.append(Row(operation, size, mode, *found[:2], left_out))
        for format, ratio in found.ratios.items():
            slowest[format] = min(slowest[format], ratio)
    return rows


def training_speed(rows: list[Row]) -> dict[str, float]:
    """Returns the ratios of training, run as `fit` runs it by default."""
    trained = (row.ratios for row in rows if row.operation in _TRAINING)
    return next(trained, {})


def judge_modes(rows: list[Row]) -> list[Finding]:
    """Returns a finding if training is faster as `fit` does not run it."""
    times = {
        (row.mode, format): row.seconds / ratio
        for row in rows
        if row.operation in _TRAINING and row.seconds
        for format, ratio in {"float32": 1.0, **row.ratios}.items()
    }
    if not times:
        return []
    default = next(iter(times))[0]
    best = min(times, key=times.__getitem__)
    known = min((k for k in times if k[0] == default), key=times.__getitem__)
    gain = times[known] / times[best]
    if gain < _MODE:
        return []
    return [
        Finding(
            "slow-mode",
            "warning",
            f"the block trains {gain:.1f} times as fast in {best[1]} without "
            f"{default} as in {known[1]} with it, the default of fit",
            "model.compile(jit_compile=False), if your model confirms it",
        )
    ]


def _second_call(step):
    """Seconds, after the first call has compiled: others may take longer."""
    step()
    start = _clock.now()
    step()
    return _clock.now() - start


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
    default, *others = active.runtime().MODES
    some = slice(1, 2) if quick else slice(None)
    for n in sizes["matmul"][some]:
        yield "matmul", f"{n} x {n}", default, workloads.matmul(n)
    count, height, channels = sizes["convolution"]
    for n in channels[some]:
        given = workloads.convolution(count, height, n)
        yield (
            "convolution",
            f"{count} x {height} x {height} x {n}",
            default,
            given,
        )
    batch, length, width = sizes["block"]
    given = workloads.block(batch, length, width, attention=not quick)
    for mode in (default,) if quick else (default, *others):
        yield _TRAINING[quick], f"{batch} x {length} x {width}", mode, given
