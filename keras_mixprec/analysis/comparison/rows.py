"""One row per arm, which text and page show, and the one to take."""

import math
import statistics
from typing import Any, NamedTuple

from keras_mixprec.analysis.comparison.verdicts import (
    CONFIDENCE,
    WITHIN,
    Interval,
    judge_metric,
    median_interval,
    pairs,
)
from keras_mixprec.formats import format_bytes, format_count


class Best(NamedTuple):
    """What `ComparisonResult.best` picked.

    Attributes:
        policy: String as `policies=` of `compare_precisions` takes it, or a
            `PrecisionPlan` (what is set beside one is in the reason).
        reason: String. The sentence that justifies it.
    """

    policy: Any
    reason: str


def rows(record: dict) -> list[dict]:
    """Returns a dict per arm, in order.

    Speeds are of pairs: each timed block of an arm against the reference's of
    the same turn, so that what slows the machine for a while is in both.

    Args:
        record: The record of a comparison.
    """
    return [_row(arm, record) for arm in record["arms"]]


def _row(arm, record):
    reference, seeds = record["arms"][0], arm["seeds"]
    metrics = _all(arm, "metric")
    blocks = [seconds for seed in seeds for seconds in seed["step_seconds"]]
    step = statistics.median(blocks) if blocks else None
    joules = _all(arm, "energy_joules_per_sample")
    energy = None
    if joules and None not in joules:
        energy = statistics.mean(joules)
    finite = len(metrics) > 1 and all(map(math.isfinite, metrics))
    return {
        "name": arm["name"],
        "status": arm["status"],
        **judge_metric(arm, record),
        # `fmean` raises where both infinities are in it.
        "metric": sum(metrics) / len(metrics) if metrics else None,
        "metric_spread": statistics.stdev(metrics) if finite else None,
        "step_seconds": step,
        "speed": _speed(arm, reference),
        "samples_per_second": step and record["samples_per_step"] / step,
        # What compiles may be known after the first seed.
        "compile_seconds": seeds[0]["compile_seconds"] if seeds else None,
        "memory_bytes": arm["memory"] and arm["memory"]["peak_bytes"],
        "memory_ratio": _memory_ratio(arm, reference),
        "energy_joules_per_sample": energy,
        "share_of_flops_16bit": arm["share_of_flops_16bit"],
        "skipped_steps": sum(_all(arm, "skipped_steps")),
        "seconds_lost": sum(_all(arm, "seconds_lost")),
        "notes": list(arm["notes"]),
    }


def _all(arm, key):
    return [seed[key] for seed in arm["seeds"]]


def _speed(arm, reference):
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


def _memory_ratio(arm, reference):
    """Only of what was measured in the same way."""
    ours, base = arm["memory"], reference["memory"]
    if not (ours and base) or ours["measured_by"] != base["measured_by"]:
        return None
    return ours["peak_bytes"] / base["peak_bytes"]


def is_known(row: dict) -> bool:
    """Whether a row has pairs of blocks enough to say which is faster.

    Which are six: the range of five holds the true median in 94% only.
    """
    return row["speed"] is not None and row["speed"]["confidence"] >= CONFIDENCE


def is_slower(row: dict) -> bool:
    """Whether a row's whole interval is below the reference's speed."""
    return is_known(row) and row["speed"]["high"] < 1


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


def shown_tolerance(record: dict) -> str:
    """Returns the tolerance in percent."""
    return f"{100 * record['tolerance']:g}%"


def pick(record: dict, rows: list[dict]) -> Best:
    """Returns the fastest arm within tolerance, else the reference.

    Args:
        record: The record of a comparison.
        rows: What `rows` made of it.
    """
    allowed = [
        (row["speed"]["estimate"], index)
        for index, row in enumerate(rows)
        if row["verdict"] == WITHIN
        and is_known(row)
        and row["speed"]["low"] > 1
    ]
    _, best = max(allowed, default=(1.0, 0))
    say = _gain if best else _no_gain
    return Best(_policy(record["arms"][best]), say(record, rows, rows[best]))


def _gain(record, rows, row):
    base = rows[0]["name"]
    memory = ""
    if row["memory_ratio"] is not None:
        change = row["memory_ratio"] - 1
        memory = (
            f", with {abs(change):.0%} {'less' if change < 0 else 'more'} "
            f"memory ({format_bytes(row['memory_bytes'])})"
        )
    return (
        f"{row['name']} trains at {shown_speed(row)} times {base}'s speed"
        f"{memory}, and its {record['metric']} is within "
        f"{shown_tolerance(record)} of {base}'s with "
        f"{format_count(row['seeds'], 'seed')}: {row['why']}."
    )


def _no_gain(record, rows, row):
    base, others = row["name"], rows[1:]
    if not others:
        return f"{base} is the only policy."
    return (
        f"{base} stays: nothing else is both within "
        f"{shown_tolerance(record)} of its {record['metric']} and faster "
        f"({'; '.join(_against(other, base) for other in others)})."
    )


def _against(row, base):
    if row["status"] != "done":
        return f"{row['name']} failed"
    if row["verdict"] != WITHIN:
        return f"{row['name']} is {row['verdict']}"
    how = "slower" if is_slower(row) else "not known to be faster"
    return f"{row['name']} is {how}, {shown_speed(row)} times {base}'s speed"


def _policy(arm):
    policy = arm["policy"]
    if isinstance(policy, str):
        return "+".join([policy, *arm["settings"]])
    # It imports Keras, which a table needs not.
    from keras_mixprec.policies.plan import PrecisionPlan

    return PrecisionPlan(policy["layers"], default=policy["default"])
