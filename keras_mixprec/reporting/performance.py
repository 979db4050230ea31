"""How fast a run was, from the rows that were logged of it."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from keras_mixprec.flop_shares import knows_flops, parameters, share_in_16_bits
from keras_mixprec.formats import (
    SIXTEEN_BITS,
    format_bytes,
    format_count,
    format_digits,
    format_share,
)
from keras_mixprec.metrics import PERFORMANCE
from keras_mixprec.reporting.schema import Row
from keras_mixprec.reporting.skipped_steps import share_skipped

# Fewer steps, or readings of their time, say nothing of the next ones.
_ENOUGH_STEPS = 20
_ENOUGH_READINGS = 5

# A step that is skipped updates nothing and takes less time: where more of them
# than this are, the median is theirs.
_MOST_SKIPPED = 0.5

# A median is within so many quartile ranges, over the root of their number, in
# 95 of 100 samples: the notch of a box plot (McGill, Tukey and Larsen, 1978).
_NOTCH = 1.57

# A mean that is so many times what half of the steps take at most is that of a
# few slow ones.
_FEW_SLOW = 1.1

# What runs are compared by: the first of these that both have.
COMPARED = "samples_per_second", "step_time"


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
        "peak_memory": row.peak_memory,
        "output_bytes_saved": row.output_bytes_saved,
        "overhead_share": row.overhead_share,
    }
    return {n: None if math.isnan(v) else v for n, v in found.items()}


def performance(
    rows: Sequence[Row],
    layers: list,
    tuner: bool = True,
    skipped: float = 0.0,
) -> dict | None:
    """Returns how fast a run was, ready for JSON; `None` without rows.

    Args:
        rows: List of `Row`, of one `fit`.
        layers: List of dicts, the table of layers as it is now.
        tuner: Boolean. Whether a tuner, or nobody knows that none, was beside
            the monitor. Defaults to `True`.
        skipped: Float. Share of skipped steps among those timed. Defaults to
            `0`.

    Returns:
        Dict with `"figures"`, a list of dicts: what `metrics.PERFORMANCE` says
        of each, with its `"value"`, and the same as `"text"`; `"speed"`, what
        the run is compared by, as `speed` returns it; and `"notes"`, sentences
        on what is to be known of the figures.
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
    value["measured_steps"] = int(sum(weights))
    for name in "overhead_share", "output_bytes_saved":
        value[name] = values[name][-1]
    compared = speed(rows, values, skipped)
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
            "value": value[name],
            "text": "–"
            if value[name] is None
            else _WRITE[metric.unit](value[name]),
        }
        for name, metric in PERFORMANCE.items()
    ]
    return {
        "figures": figures,
        "speed": compared,
        "notes": [*_notes(value, compared["lacks"])],
    }


def speed_notes(overview: dict) -> list[str]:
    """Returns what is to be known of the speed of a run, in sentences.

    Args:
        overview: Dict, as `RunData.overview` returns it.
    """
    begins = [e for e in overview["events"] if e["kind"] == "train_begin"]
    found = overview["performance"]
    if found is None:
        return [_NOT_TIMED] if begins else []
    if len(begins) < 2:
        return found["notes"]
    first, last = begins[-1]["step"] + 1, overview["last_step"]
    count = len(begins)
    of = f"Of fit {count} of {count}, steps {first:,} to {last:,}."
    return [of, *found["notes"]]


_NOT_TIMED = (
    "No step of this run was timed: it had too few steps without a probe or a "
    "diagnosis (more steps, or a larger probe_every, leave some)."
)


def _notes(value, lacks):
    """What is to be known of figures before they are taken for the speed."""
    if lacks and lacks["what"] == "trained":
        yield (
            f"This run has {lacks['text']}, since a step that updates no "
            "weights takes less time."
        )
    mean, half = value["step_time"], value["step_time_median"]
    if half is not None and mean > _FEW_SLOW * half:
        yield (
            "The step time is the mean, which a few slow steps raise: half of "
            f"the steps took at most {_time(half)}."
        )


def skipped_of_timed(rows: Sequence[Row], scale: list, first: int) -> float:
    """Returns the share of skipped steps among those timed.

    Args:
        rows: List of `Row`, of one `fit`.
        scale: List of dicts, the loss scale of each optimizer by step.
        first: Int. The step after which that `fit` began.
    """
    ends = [first, *(row.step for row in rows)]
    timed = [row.steps for row in rows]
    return share_skipped(scale, [*zip(ends, ends[1:], timed, strict=False)])


def speed(rows: Sequence[Row], values: dict, skipped: float) -> dict:
    """Returns what two runs are compared by, and whether they may be.

    Args:
        rows: List of `Row`.
        values: Dict from the names of figures to their values by row.
        skipped: Float. Share of skipped steps among those timed.

    Returns:
        Dict with `"skipped"`, that share; `"lacks"`, `None` if the run may be
        compared, or a dict of `"what"` it has too little of (`"trained"`:
        steps that were not skipped, `"steps"` or `"readings"`) and of `"text"`,
        the same in words; and `"medians"`, by figure a dict of `"median"` and
        `"off"`, how far off that may be.
    """
    steps = sum(row.steps for row in rows)
    known = {n: [v for v in values[n] if v and v > 0] for n in COMPARED}
    return {
        "skipped": skipped,
        "lacks": _lacks(steps, len(rows), skipped),
        "medians": {name: _median(v) for name, v in known.items() if v},
    }


def _lacks(steps, readings, skipped):
    timed = format_count(int(steps), "step")
    if skipped > _MOST_SKIPPED:
        share = "all" if skipped == 1 else format_share(skipped)
        text = f"{share} of the timed steps skipped: no speed of training"
        return {"what": "trained", "text": text}
    if steps < _ENOUGH_STEPS:
        text = f"{timed} measured, {_ENOUGH_STEPS} are needed"
        return {"what": "steps", "text": text}
    if readings < _ENOUGH_READINGS:
        has = format_count(readings, "reading")
        text = f"{has} of the time of a step, {_ENOUGH_READINGS} are needed"
        return {"what": "readings", "text": text}
    return None


def _median(values):
    first, median, third = np.percentile(values, [25, 50, 75]).tolist()
    off = _NOTCH * (third - first) / len(values) ** 0.5
    return {"median": median, "off": off}


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
    >>> from keras_mixprec.reporting.performance import performance, sentence
    >>> from keras_mixprec.reporting.schema import Row
    >>> row = Row(50, 50, 0.1, 1600, 0.0019, 0.0025, 2e9, 0.4, 0.004, 1.5)
    >>> sentence(performance([row], []))
    '2 ms a step (95th percentile 2.5 ms), 16,000 samples/s; peak memory \
1.86 GiB; monitor and tuner take 0.4% of the time, and 1.5 s once.'
    """
    value = {f["name"]: f["value"] for f in found["figures"]}
    title = {f["name"]: f["title"] for f in found["figures"]}
    pace = f"{_time(value['step_time'])} a step"
    if value["measured_steps"] < _ENOUGH_STEPS:
        steps = format_count(value["measured_steps"], "step")
        pace += f" (measured on {steps} only)"
    elif value["step_time_p95"] is not None:
        pace += f" (95th percentile {_time(value['step_time_p95'])})"
    if value["samples_per_second"] is not None:
        pace += f", {format_digits(value['samples_per_second'])} samples/s"
    if (lacks := found["speed"]["lacks"]) and lacks["what"] == "trained":
        pace += f", with {lacks['text']}"
    parts = [pace]
    if value["peak_memory"] is not None:
        parts.append(f"peak memory {format_bytes(value['peak_memory'])}")
    who, _, _ = title["overhead_share"].partition(",")
    took = "take" if " and " in who else "takes"
    overhead = f"{who} {took} {format_share(value['overhead_share'])}"
    once = f"{_time(value['once_seconds'])} once"
    parts.append(f"{overhead} of the time, and {once}")
    return f"{'; '.join(parts)}."


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
