"""A comparison that a reviewer can check, and run again by one command."""

import hashlib
import json
import os
import shlex
from typing import Any

from keras_mixprec.analysis.comparison.best import best_index, reason
from keras_mixprec.analysis.comparison.record import (
    Comparison,
    check,
    from_json,
    read_json,
    to_json,
)
from keras_mixprec.analysis.comparison.result_text import remarks, title
from keras_mixprec.analysis.comparison.rows import rows as rows_of
from keras_mixprec.analysis.comparison.rows import shown_speed

FORMAT = "keras_mixprec.sign_off"
VERSION = 1

_KEYS = {"format", "version", "verdicts", "best", "digest", "record"}

# Keys of a record that are arguments of `compare_precisions`.
_ARGUMENTS = {
    "batch_size",
    "blocks",
    "isolate",
    "seeds",
    "steps",
    "tokens_per_sample",
    "tolerance",
}

# What the loss scale of an arm is behind, in its name.
_SCALE = ", loss scale "


def content(
    record: Comparison, rows: list[dict], path: str | os.PathLike
) -> dict[str, Any]:
    """Returns what is signed.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
        path: String or path-like. Where it will be, for the commands.
    """
    name = shlex.quote(os.path.basename(os.fspath(path)))
    why_not = why_not_rerun(record)
    return {
        "format": FORMAT,
        "version": VERSION,
        "statement": [
            title(record),
            *remarks(record, rows),
            f"Best: {reason(record, rows)}",
        ],
        "verdicts": _verdicts(rows),
        "best": rows[best_index(rows)]["name"],
        "check": f"keras-mixprec compare --check {name}",
        "rerun": None if why_not else f"keras-mixprec compare --rerun {name}",
        "why_no_rerun": why_not,
        "digest": _digest(record),
        "record": record,
    }


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Returns what was signed.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no sign-off, or is damaged.
    """
    found = from_json(read_json(path))
    if (
        not isinstance(found, dict)
        or (found.get("format"), found.get("version")) != (FORMAT, VERSION)
        or not found.keys() >= _KEYS
    ):
        raise ValueError(
            "The file is not what `ComparisonResult.sign_off` of this version "
            f"writes. Received: path={str(path)!r}"
        )
    check(found["record"], str(path))
    return found


def problems(signed: dict[str, Any]) -> list[str]:
    """Returns what does not follow from the measurements, a line each.

    Args:
        signed: What `read` returned.
    """
    record = signed["record"]
    rows = rows_of(record)
    found = []
    if _digest(record) != signed["digest"]:
        found.append("the measurements are not those that were signed")
    found += changed_verdicts(signed["verdicts"], _verdicts(rows))
    if rows[best_index(rows)]["name"] != signed["best"]:
        found.append(f"best is not {signed['best']!r}: {reason(record, rows)}")
    return found


def changed_verdicts(before: list[dict], after: list[dict]) -> list[str]:
    """Returns a line for each arm whose verdict is another.

    Args:
        before: List of dicts with `name` and `verdict`.
        after: The same.
    """
    now = {row["name"]: row["verdict"] for row in after}
    return [
        f"{row['name']}: signed as {row['verdict']!r}, now "
        f"{now.get(row['name'], 'missing')!r}"
        for row in before
        if now.get(row["name"]) != row["verdict"]
    ]


def circumstances(before: Comparison, after: Comparison) -> list[str]:
    """Returns what was not the same when a comparison was run again.

    Args:
        before: The record that was signed.
        after: The record of the second time.
    """
    found = [
        f"{name} {was} was signed, here it is {after['versions'].get(name)}"
        for name, was in before["versions"].items()
        if after["versions"].get(name) != was
    ]
    if before["device"] != after["device"]:
        found.append(f"{before['device']} was signed, here: {after['device']}")
    return found


def why_not_rerun(record: Comparison) -> str | None:
    """Returns why no command can run a comparison again, `None` if one can.

    Args:
        record: The record of a comparison.
    """
    for name, value in record["sources"].items():
        # A metric may be one of the model's.
        if value is None or (name == "metric" and ":" not in value):
            continue
        if why := _why_not_named(value):
            return f"`{name}` {why}"
    return None


def _why_not_named(value):
    module, _, name = value.partition(":")
    if not name:
        return f"was handed over as an object, of type {value}"
    if "<" in name:
        return f"is no function at the top of a module: {value}"
    if module == "__main__":
        return "is defined in a script or a notebook, not in a module"
    return None


def arguments(record: Comparison) -> dict[str, Any]:
    """Returns the arguments of `compare_precisions` that measured a record.

    Args:
        record: The record of a comparison.

    Raises:
        ValueError: If something in it cannot be named.
    """
    if why := why_not_rerun(record):
        raise ValueError(f"The comparison cannot be run again: {why}")
    return {
        **record["sources"],
        **{k: v for k, v in record.items() if k in _ARGUMENTS},
        "policies": _policies(record),
        "loss_scales": _loss_scales(record),
        "mode": "max" if record["metric_higher_is_better"] else "min",
    }


def _policies(record):
    from keras_mixprec.policies.plan import PrecisionPlan

    found = {}
    for arm in record["arms"]:
        policy = arm["policy"]
        if not isinstance(policy, str):
            policy = PrecisionPlan(policy["layers"], default=policy["default"])
        name = arm["name"].partition(_SCALE)[0]
        found[name] = (policy, *arm["settings"])
    return found


def _loss_scales(record):
    names = [arm["name"].partition(_SCALE)[2] for arm in record["arms"]]
    return list(dict.fromkeys(filter(None, names))) or None


def _verdicts(rows):
    return [
        {
            "name": row["name"],
            "verdict": row["verdict"],
            "why": row["why"],
            "speed": shown_speed(row),
        }
        for row in rows
    ]


def _digest(record):
    """Of the measurements: against accidents, as anybody can compute it."""
    plain = json.dumps(to_json(record), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()
