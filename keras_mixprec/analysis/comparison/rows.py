"""One row per arm: what text and page show."""

from keras_mixprec.analysis.comparison.intervals import (
    CONFIDENCE,
    Interval,
    mean,
    median_interval,
    spread,
)
from keras_mixprec.analysis.comparison.record import (
    Arm,
    Comparison,
    median_step,
    samples_per_second,
)
from keras_mixprec.analysis.comparison.verdicts import judge_metric, pairs
from keras_mixprec.formats import format_bytes


def rows(record: Comparison) -> list[dict]:
    """Returns a dict per arm, in order.

    Speeds are of pairs: each timed block of an arm against the reference's of
    the same turn, so that what slows the machine for a while is in both.

    Args:
        record: The record of a comparison.
    """
    return [_row(arm, record) for arm in record["arms"]]


def _row(arm, record):
    reference = record["arms"][0]
    throughput = samples_per_second(arm, record)
    tokens = record["tokens_per_sample"]
    metrics = [seed["metric"] for seed in arm["seeds"]]
    return {
        "name": arm["name"],
        "status": arm["status"],
        **judge_metric(arm, record),
        "metric": mean(metrics) if metrics else None,
        "metric_spread": spread(metrics),
        "step_seconds": median_step(arm),
        "speed": _speed(arm, reference),
        "samples_per_second": throughput,
        "tokens_per_second": throughput and tokens and throughput * tokens,
        "compile_seconds": arm["compile_seconds"],
        "memory_bytes": _peak(arm),
        "memory_ratio": _memory_ratio(arm, reference),
        "energy_joules_per_sample": arm["energy_joules_per_sample"],
        "share_of_flops_16bit": arm["share_of_flops_16bit"],
        "skipped_steps": sum(seed["skipped_steps"] for seed in arm["seeds"]),
        "seconds_lost": sum(seed["seconds_lost"] for seed in arm["seeds"]),
        "notes": list(arm["notes"]),
    }


def _speed(arm: Arm, reference: Arm) -> dict | None:
    """How many times as fast as the reference, with its interval."""
    if arm is reference:
        return Interval(1.0, 1.0, 1.0, 1.0)._asdict()
    ratios = [
        base / seconds
        for ours, theirs in pairs(arm, reference)
        for base, seconds in zip(
            theirs["step_seconds"], ours["step_seconds"], strict=False
        )
    ]
    return median_interval(ratios)._asdict() if ratios else None


def _peak(arm):
    return arm["memory"] and arm["memory"]["peak_bytes"]


def _memory_ratio(arm, reference):
    """Only of what was measured in the same way."""
    ours, base = arm["memory"], reference["memory"]
    if not (ours and base) or ours["measured_by"] != base["measured_by"]:
        return None
    return ours["peak_bytes"] / base["peak_bytes"]


def is_faster(row: dict) -> bool:
    """Whether a row's whole interval is above the reference's speed."""
    return has_speed(row) and row["speed"]["low"] > 1


def is_slower(row: dict) -> bool:
    """Whether a row's whole interval is below the reference's speed."""
    return has_speed(row) and row["speed"]["high"] < 1


def has_speed(row: dict) -> bool:
    """Whether a row has pairs of blocks enough to say which is faster.

    Which are six: the range of five holds the true median in 94% only.
    """
    return row["speed"] is not None and row["speed"]["confidence"] >= CONFIDENCE


def shown_speed(row: dict) -> str:
    """Returns the speed and its interval, `"-"` without one."""
    if row["speed"] is None:
        return "-"
    values = [row["speed"][name] for name in ("estimate", "low", "high")]
    # What is slower must not be shown as 1.00.
    near = any(x != 1 and round(x, 2) == 1 for x in values)
    digits = 3 if near or values[0] < 0.1 else 2
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return middle if low == high else f"{middle} ({low}-{high})"


def shown_bytes(count: int | None) -> str:
    """Returns a number of bytes in words, `"-"` for `None`."""
    return "-" if count is None else format_bytes(count)


def shown_metric(row: dict) -> str:
    """Returns the metric with its spread over seeds, `"-"` without one."""
    if row["metric"] is None:
        return "-"
    spread = row["metric_spread"]
    return f"{row['metric']:.4g}" + (f" ±{spread:.2g}" if spread else "")


def shown_tolerance(record: Comparison) -> str:
    """Returns the tolerance in percent."""
    return f"{100 * record['tolerance']:g}%"
