"""The speed of a run, from the rows in its log."""

import itertools
import math
from collections.abc import Callable, Sequence

from keras_mixprec.formats import (
    format_bytes,
    format_count,
    format_digits,
    format_share,
)
from keras_mixprec.metrics import PERFORMANCE
from keras_mixprec.reporting.schema import Row

# The least number of timed steps that predicts the speed of later steps.
_ENOUGH_STEPS = 20

# Skipped steps take less time than applied steps. If more than this share of
# the steps was skipped, the step time says little about training.
_MOST_SKIPPED = 0.5


def rates_of(row: Row) -> dict:
    """Returns the figures of a row by name, `None` if not known."""
    found = {
        "step_time": row.seconds / row.steps,
        "step_time_median": row.step_time_median,
        "step_time_p95": row.step_time_p95,
        "samples_per_second": row.samples / row.seconds,
        "peak_memory": row.peak_memory,
        "output_bytes_saved": row.output_bytes_saved,
        "overhead_share": row.overhead_share,
    }
    return {n: None if math.isnan(v) else v for n, v in found.items()}


def speed_values(rows: Sequence[Row]) -> dict:
    """Returns the figures of a run by name, `None` if not known.

    Args:
        rows: List of `Row` of one `fit`, not empty.
    """
    rates = [rates_of(row) for row in rows]
    weights = [row.steps for row in rows]
    values = {name: [rate[name] for rate in rates] for name in rates[0]}
    found = {name: _weighted(own, weights) for name, own in values.items()}
    # The size of TensorFlow's first batches is not known, so leave out their
    # rows.
    counted = [row for row in rows if not math.isnan(row.samples)]
    steps, samples = (sum(row[n] for row in counted) for n in (1, 3))
    peaks = [peak for peak in values["peak_memory"] if peak is not None]
    pace = samples / steps / found["step_time"] if steps else None
    return found | {
        "samples_per_second": pace,
        "step_time_p95": _percentile_95(rows),
        "measured_steps": int(sum(weights)),
        "overhead_share": values["overhead_share"][-1],
        "output_bytes_saved": values["output_bytes_saved"][-1],
        "peak_memory": max(peaks, default=None),
        "once_seconds": rows[-1].once_seconds,
    }


def figures(values: dict, watchers: str) -> list[dict]:
    """Returns the figures of a card: title, text, value and explanation.

    Args:
        values: Dict from `speed_values`.
        watchers: String. The callbacks that cause the overhead.
    """
    return [
        {
            "name": name,
            "title": metric.title.replace("monitor and tuner", watchers),
            "explanation": metric.explanation,
            "value": values[name],
            "text": _WRITE[metric.unit](values[name]),
        }
        for name, metric in PERFORMANCE.items()
        if values[name] is not None
    ]


def speed_in_words(values: dict, watchers: str, skipped: float) -> str:
    """Returns the figures in one sentence.

    Args:
        values: Dict from `speed_values`.
        watchers: String, as in `figures`.
        skipped: Float. The share of skipped steps.

    Example:
    >>> from keras_mixprec.reporting.performance import (
    ...     speed_in_words, speed_values
    ... )
    >>> from keras_mixprec.reporting.schema import Row
    >>> row = Row(50, 50, 0.1, 1600, 0.0019, 0.0025, 2e9, 0.4, 0.004, 1.5)
    >>> speed_in_words(speed_values([row]), "monitor", 0.0)
    '2 ms a step (95th percentile 2.5 ms), 16,000 samples/s; peak memory \
1.86 GiB; monitor: 0.4% of the time, and 1.5 s once.'
    """
    pace = f"{_time(values['step_time'])} a step"
    if values["measured_steps"] < _ENOUGH_STEPS:
        steps = format_count(values["measured_steps"], "step")
        pace += f" (measured on {steps} only)"
    elif values["step_time_p95"] is not None:
        pace += f" (95th percentile {_time(values['step_time_p95'])})"
    if values["samples_per_second"] is not None:
        pace += f", {format_digits(values['samples_per_second'])} samples/s"
    parts = [pace]
    if skipped > _MOST_SKIPPED:
        gone = f"{format_share(skipped)} of the steps were skipped"
        parts.append(f"{gone}, and skipped steps take less time")
    if values["peak_memory"] is not None:
        parts.append(f"peak memory {format_bytes(values['peak_memory'])}")
    overhead = format_share(values["overhead_share"])
    once = _time(values["once_seconds"])
    parts.append(f"{watchers}: {overhead} of the time, and {once} once")
    return f"{'; '.join(parts)}."


def is_of_training(values: dict, skipped: float) -> bool:
    """Returns whether the timed steps are typical of training."""
    enough = values["measured_steps"] >= _ENOUGH_STEPS
    return enough and skipped <= _MOST_SKIPPED


def _percentile_95(rows):
    """Estimates the 95th percentile of all steps.

    The median of a row stands for 90% of its steps. The percentile of the row
    stands for the other 10%.
    """
    known = [row for row in rows if not math.isnan(row.step_time_p95)]
    times = [row.step_time_median for row in known]
    times += [row.step_time_p95 for row in known]
    weights = [0.9 * row.steps for row in known]
    weights += [0.1 * row.steps for row in known]
    return _weighted(times, weights, 0.95)


def _weighted(values, weights, share=0.5):
    """Returns the weighted quantile of the values, leaving out `None`."""
    pairs = zip(values, weights, strict=True)
    known = sorted(pair for pair in pairs if pair[0] is not None)
    wanted = share * sum(weight for _, weight in known)
    sums = itertools.accumulate(weight for _, weight in known)
    reached = zip(known, sums, strict=True)
    return next((v for (v, _), total in reached if total >= wanted), None)


def _time(seconds):
    if seconds >= 1:
        return f"{format_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{format_digits(seconds * 1e3)} ms"
    return f"{format_digits(seconds * 1e6)} µs"


_WRITE: dict[str, Callable] = {
    "bytes": format_bytes,
    "seconds": _time,
    "share": format_share,
    "rate": format_digits,
    "count": "{:,}".format,
}
