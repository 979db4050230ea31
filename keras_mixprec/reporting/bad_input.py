"""Readings of batches that were not finite: no overflow, and no format helps.

A NaN in the inputs makes all activations and gradients behind it NaN, which
looks like an overflow where only numbers are seen. The log names those steps.
"""

from collections.abc import Iterable, Mapping

import numpy as np


def bad_input_steps(events: Iterable[dict]) -> dict[int, dict]:
    """Returns the steps whose inputs were not finite, as far as is logged.

    Args:
        events: Dicts, as `read_events` yields them.

    Returns:
        Dict from steps to the first bad row of each part of the batch, empty
        where that is not known.
    """
    found: dict = {}
    for event in events:
        for step, rows in _steps_of(event):
            found[step] = rows or found.get(step, {})
    return found


def _steps_of(event):
    kind, step = event["kind"], event.get("at_step", event["step"])
    if kind == "bad_batches":
        batches = event.get("batches")
        known = filter(_is_batch, batches if isinstance(batches, list) else [])
        yield from ((b["step"], _rows(b.get("rows"))) for b in known)
    elif event.get("bad_input") or event.get("verdict") == "bad_data":
        yield step, _rows(event.get("bad_input"))


def _is_batch(batch):
    return isinstance(batch, dict) and isinstance(batch.get("step"), int)


def _rows(rows):
    return rows if isinstance(rows, dict) else {}


def bad_data_clause(verdict: Mapping, events: list) -> str:
    """Returns which samples were bad, or which rows of the first batch.

    Samples are of the arrays that `fit` was given. A diagnosis may be of a
    later batch than the first, the first that its schedule met.

    Args:
        verdict: Dict, an event of that.
        events: List of dicts, as `Facts` has them.
    """
    steps = bad_input_steps(events)
    counts = [e["count"] for e in events if e["kind"] == "bad_batches"]
    count = max(len(steps), *counts[-1:], 1)
    at = verdict.get("at_step", verdict["step"])
    first = min([*steps, at])
    numbers = verdict.get("numbers", {})
    of_all = any(name.startswith("samples_") for name in numbers)
    if first != at and not of_all:
        rows = steps[first].items()
        numbers = {f"rows_of_{part}": [row] for part, row in rows}
    when = f"at step {first:,}"
    if count > 1:
        when = f"in {count:,} batches, the first {when}"
    if of_all:
        return f"{_samples(numbers)} ({when})"
    return f"bad data {when}{_rows_of_first(numbers)}"


_PARTS = ("x", "y", "sample_weight")


def _samples(numbers):
    found = {part: numbers.get(f"samples_of_{part}") for part in _PARTS}
    counts = {
        part: numbers.get(f"bad_samples_of_{part}", len(listed))
        for part, listed in found.items()
        if listed
    }
    named = (_named(found[part], n, part) for part, n in counts.items())
    are = "is" if sum(counts.values()) == 1 else "are"
    return f"{' and '.join(named)} {are} not finite"


def _named(listed, count, part):
    names = ", ".join(map(str, listed))
    if count > len(listed):  # Only the first are listed.
        return f"{count:,} rows of {part} ({names}, …)"
    return f"row{'s' * (count > 1)} {names} of {part}"


def _rows_of_first(numbers):
    """In parentheses, as far as is known."""
    rows = [
        f"row{'s' if len(listed) > 1 else ''} "
        f"{', '.join(map(str, listed))} of that batch's {part}"
        for part in _PARTS
        if (listed := numbers.get(f"rows_of_{part}"))
    ]
    many = len(rows) > 1 or rows[:1] and rows[0].startswith("rows")
    are = "are" if many else "is"
    return f" ({' and '.join(rows)} {are} not finite)" if rows else ""


def mark_spoiled(tables: list, events: list):
    """Marks the rows of tables that were measured on such batches.

    A long log has one row for several readings, the worst of them, at the step
    of the last. What is not finite in it is of the bad batch, if no other step
    in between was skipped.

    Args:
        tables: List of `Table`, the tables of a family by rising step.
        events: List of dicts.
    """
    bad = sorted(bad_input_steps(events))
    if not bad or not tables:
        return
    # How far a loss scale fell is of a step, too.
    skips = (e for e in events if e["kind"] == "skipped_step")
    failed = {e["at_step"] for e in skips if "at_step" in e}
    skipped = sorted(failed.difference(bad))
    steps = np.concatenate([table.steps for table in tables])
    gaps = np.diff(steps)
    before = np.concatenate([steps[:1] - 1, steps[:-1]])
    is_pooled = np.concatenate([[False], gaps > gaps.min(initial=2**62)])

    def some(found):
        places = np.searchsorted(found, [before, steps], "right")
        return places[1] > places[0]

    spoiled = np.isin(steps, bad) | (is_pooled & some(bad) & ~some(skipped))
    ends = np.cumsum([len(table.steps) for table in tables])
    for table, rows in zip(tables, np.split(spoiled, ends), strict=False):
        table.spoiled = rows
