"""The arm that a person should take, and the sentence that says why."""

from typing import Any, NamedTuple

from keras_mixprec.analysis.comparison.record import Arm, Comparison
from keras_mixprec.analysis.comparison.rows import (
    is_faster,
    is_slower,
    shown_bytes,
    shown_speed,
    shown_tolerance,
)
from keras_mixprec.analysis.comparison.verdicts import WITHIN
from keras_mixprec.formats import format_count


class Best(NamedTuple):
    """What `ComparisonResult.best` picked.

    Attributes:
        policy: String as `policies=` of `compare_precisions` takes it, or a
            `PrecisionPlan` (what is set beside one is in the reason).
        reason: String. The sentence that justifies it.
    """

    policy: Any
    reason: str


def pick(record: Comparison, rows: list[dict]) -> Best:
    """Returns the fastest arm within tolerance, else the reference.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
    """
    arm = record["arms"][best_index(rows)]
    return Best(_policy(arm), reason(record, rows))


def reason(record: Comparison, rows: list[dict]) -> str:
    """Returns the sentence that justifies what `pick` returns.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
    """
    best = best_index(rows)
    return _gain(record, rows[best]) if best else _no_gain(record, rows)


def best_index(rows: list[dict]) -> int:
    """Returns which of the rows is best."""
    allowed = [
        index
        for index, row in enumerate(rows)
        if row["verdict"] == WITHIN and is_faster(row)
    ]
    return max(allowed, key=lambda i: rows[i]["speed"]["estimate"], default=0)


def _gain(record, row):
    base = record["arms"][0]["name"]
    parts = [f"{row['name']} trains at {shown_speed(row)} times {base}'s speed"]
    if row["memory_ratio"] is not None:
        parts.append(f"with {_memory(row)}")
    parts.append(
        f"and its {record['metric']} is within {shown_tolerance(record)} of "
        f"{base}'s with {format_count(row['seeds'], 'seed')}: {row['why']}"
    )
    return ", ".join(parts) + "."


def _memory(row):
    change = row["memory_ratio"] - 1
    how = "less" if change < 0 else "more"
    return (
        f"{abs(change):.0%} {how} memory ({shown_bytes(row['memory_bytes'])})"
    )


def _no_gain(record, rows):
    base = record["arms"][0]["name"]
    others = [_against(row, base) for row in rows[1:]]
    if not others:
        return f"{base} is the only policy."
    return (
        f"{base} stays: nothing else is both within "
        f"{shown_tolerance(record)} of its {record['metric']} and faster "
        f"({'; '.join(others)})."
    )


def _against(row, base):
    speed = f"{shown_speed(row)} times {base}'s speed"
    if row["status"] != "done":
        return f"{row['name']} failed"
    if row["verdict"] != WITHIN:
        return f"{row['name']} is {row['verdict']}"
    if is_slower(row):
        return f"{row['name']} is slower, {speed}"
    return f"{row['name']} is not known to be faster, {speed}"


def _policy(arm: Arm):
    policy = arm["policy"]
    if isinstance(policy, str):
        return "+".join([policy, *arm["settings"]])
    # It imports Keras, which a table needs not.
    from keras_mixprec.policies.plan import PrecisionPlan

    return PrecisionPlan(policy["layers"], default=policy["default"])
