"""How fast a run was, from the rows that were logged of it."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from keras_mixprec.flop_shares import knows_flops, parameters, share_in_16_bits
from keras_mixprec.formats import SIXTEEN_BITS, format_count, format_digits
from keras_mixprec.metrics import PERFORMANCE

# Of fewer steps the next ones may be anything.
ENOUGH_STEPS = 20


class Row(NamedTuple):
    """A row of the log, with the columns that `schema` says."""

    step: float
    steps: float
    seconds: float
    input_seconds: float
    samples: float
    step_time_median: float
    step_time_p95: float
    peak_memory: float
    output_bytes_saved: float
    overhead_share: float
    once_seconds: float


def rates_of(row: Row) -> dict:
    """Returns the figures of one row by name, `None` where not known.

    Args:
        row: `Row`.
    """
    found = {
        "step_time": row.seconds / row.steps,
        "step_time_median": row.step_time_median,
        "step_time_p95": row.step_time_p95,
        "samples_per_second": row.samples / row.seconds,
        "input_share": row.input_seconds / row.seconds,
        "peak_memory": row.peak_memory,
        "output_bytes_saved": row.output_bytes_saved,
        "overhead_share": row.overhead_share,
    }
    return {n: None if math.isnan(v) else v for n, v in found.items()}


def performance(
    rows: Sequence[Row], layers: list, tuner: bool = True
) -> dict | None:
    """Returns how fast a run was, ready for JSON; `None` without rows.

    Args:
        rows: List of `Row`, of one `fit`.
        layers: List of dicts, the table of layers as it is now.
        tuner: Boolean. Whether a tuner, or nobody knows that none, was beside
            the monitor. Defaults to `True`.

    Returns:
        Dict with `"steps"`, the step of each row, and `"figures"`, a list of
        dicts: what `metrics.PERFORMANCE` says of each, with its `"value"` and
        its `"values"` by row.
    """
    if not rows:
        return None
    rows = _with_samples(rows)
    rates = [rates_of(row) for row in rows]
    weights = [row.steps for row in rows]
    values = {name: [rate[name] for rate in rates] for name in rates[0]}
    value = {name: _weighted(values[name], weights) for name in values}
    value["samples_per_second"] = _sample_rate(values, weights)
    value["step_time_p95"] = _percentile_95(rows)
    value["measured_steps"] = sum(weights)
    for name in "overhead_share", "output_bytes_saved":
        value[name] = values[name][-1]
    value["input_share"] = _input_share(rows)
    peaks = [peak for peak in values["peak_memory"] if peak is not None]
    value["peak_memory"] = max(peaks, default=None)
    value["once_seconds"] = rows[-1].once_seconds
    value |= _of_layers(layers)
    who = "monitor and tuner" if tuner else "monitor"
    figures = [
        {
            "name": name,
            "title": metric.title.replace("monitor and tuner", who),
            "explanation": metric.explanation,
            "kind": metric.unit,
            "worst": metric.worst,
            "value": value[name],
            "values": values.get(name, []),
        }
        for name, metric in PERFORMANCE.items()
    ]
    return {"steps": [int(row.step) for row in rows], "figures": figures}


def _with_samples(rows):
    """Rows from before TensorFlow's first batch was looked at have them too.

    Otherwise samples a second would be of other rows than the time of a step.
    """
    known = [row for row in rows if not math.isnan(row.samples)]
    steps = sum(row.steps for row in known)
    if not steps:
        return rows
    per_step = sum(row.samples for row in known) / steps
    return [
        row._replace(samples=row.steps * per_step)
        if math.isnan(row.samples)
        else row
        for row in rows
    ]


def _sample_rate(values, weights):
    """Of two rows, that of which the time of a step is told as well."""
    rates = values["samples_per_second"]
    slowness = [None if rate is None else -rate for rate in rates]
    found = _weighted(slowness, weights)
    return None if found is None else -found


def _percentile_95(rows):
    """Of all steps: what is above nine tenths of a row is about its own.

    A row may be of one step, which is its median and percentile alike.
    """
    known = [row for row in rows if not math.isnan(row.step_time_p95)]
    times = [row.step_time_median for row in known]
    times += [row.step_time_p95 for row in known]
    weights = [0.9 * row.steps for row in known]
    weights += [0.1 * row.steps for row in known]
    return _weighted(times, weights, 0.95)


def _weighted(values, weights, share=0.5):
    """The value that this share of the weight is at most."""
    known = [
        (value, weight)
        for value, weight in zip(values, weights, strict=True)
        if value is not None
    ]
    known.sort()
    wanted = share * sum(weight for _, weight in known)
    sums = itertools.accumulate(weight for _, weight in known)
    pairs = zip(known, sums, strict=True)
    return next((value for (value, _), total in pairs if total >= wanted), None)


def _input_share(rows):
    known = [row for row in rows if not math.isnan(row.input_seconds)]
    total = sum(row.seconds for row in known)
    return sum(row.input_seconds for row in known) / total if total else None


def _of_layers(layers):
    total = sum(map(parameters, layers))
    narrow = [x for x in layers if x.get("variable_dtype") in SIXTEEN_BITS]
    saved = sum(map(parameters, narrow)) / 2
    return {
        "flops_in_16_bits": share_in_16_bits(layers)
        if knows_flops(layers)
        else None,
        "weight_bytes_saved": saved / total if total else None,
    }


def sentence(found: dict) -> str:
    """Returns the figures in a line.

    Args:
        found: Dict, as `performance` returns it.

    Example:
    >>> from keras_mixprec.reporting.performance import (
    ...     Row, performance, sentence
    ... )
    >>> row = Row(50, 50, 0.1, 0.01, 1600, 0.0019, 0.0025, 2e9, 0.4, 0.004, 1.5)
    >>> sentence(performance([row], []))
    '2 ms a step (95th percentile 2.5 ms), 16,000 samples/s, 10% of the \
time in input; peak memory 2 GB; monitor and tuner 0.4%, and 1.5 s \
for what is done once.'
    """
    value = {f["name"]: f["value"] for f in found["figures"]}
    title = {f["name"]: f["title"] for f in found["figures"]}
    speed = f"{_time(value['step_time'])} a step"
    if value["measured_steps"] < ENOUGH_STEPS:
        speed += f", of only {format_count(value['measured_steps'], 'step')}"
    elif value["step_time_p95"] is not None:
        speed += f" (95th percentile {_time(value['step_time_p95'])})"
    if value["samples_per_second"] is not None:
        speed += f", {format_digits(value['samples_per_second'])} samples/s"
    if value["input_share"] is not None:
        speed += f", {value['input_share']:.0%} of the time in input"
    parts = [speed]
    if value["peak_memory"] is not None:
        parts.append(f"peak memory {_bytes(value['peak_memory'])}")
    who, _, _ = title["overhead_share"].partition(",")
    overhead = f"{who} {value['overhead_share']:.1%}"
    once = f"{_time(value['once_seconds'])} for what is done once"
    parts.append(f"{overhead}, and {once}")
    return f"{'; '.join(parts)}."


def _time(seconds):
    if seconds >= 1:
        return f"{format_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{format_digits(seconds * 1e3)} ms"
    return f"{format_digits(seconds * 1e6)} µs"


def _bytes(count):
    exponent = min(int(math.log10(max(count, 1)) / 3), 4)
    unit = ("B", "kB", "MB", "GB", "TB")[exponent]
    return f"{format_digits(count / 1000**exponent)} {unit}"
