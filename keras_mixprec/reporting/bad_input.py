"""Readings of batches that were not finite: no overflow, and no format helps.

A NaN in the inputs makes all activations and gradients behind it NaN, which
looks like an overflow where only numbers are seen. The log names those steps.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from keras_mixprec.formats import format_names


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
            known = rows if isinstance(rows, dict) else {}
            found[step] = known or found.get(step, {})
    return found


def _steps_of(event):
    if event["kind"] == "bad_batches":
        listed = event.get("batches") or []
        batches = [batch for batch in listed if isinstance(batch, dict)]
        known = [b for b in batches if isinstance(b.get("step"), int)]
        yield from ((b["step"], b.get("rows")) for b in known)
    elif event.get("bad_input") or event.get("verdict") == "bad_data":
        yield event.get("at_step", event["step"]), event.get("bad_input")


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
    when = f"at step {first:,}"
    if count > 1:
        when = f"in {count:,} batches, the first {when}"
    numbers = verdict.get("numbers", {})
    if samples := _of(numbers, "samples_of_"):
        named = [
            _named(rows, numbers.get(f"bad_samples_of_{part}"), part)
            for part, rows in samples.items()
        ]
        return f"{_are(named)} not finite ({when})"
    rows = _of(numbers, "rows_of_")
    if first != at:
        rows = {part: [row] for part, row in steps[first].items()}
    named = [_named(own, None, f"that batch's {p}") for p, own in rows.items()]
    said = f" ({_are(named)} not finite)" if named else ""
    return f"bad data {when}{said}"


def _of(numbers, start):
    """Rows by part of the batch: `"x"`, or one of its arrays by its key."""
    found = {
        name.removeprefix(start): rows
        for name, rows in numbers.items()
        if name.startswith(start)
    }
    return {part: rows for part, rows in found.items() if rows}


def _named(rows, count, part):
    names = ", ".join(map(str, rows))
    count = count or len(rows)
    if count > len(rows):  # Only the first are listed.
        return f"{count:,} rows of {part} ({names}, …)"
    return f"row{'s' * (count > 1)} {names} of {part}"


def _are(named):
    is_one = len(named) == 1 and named[0].startswith("row ")
    return f"{' and '.join(named)} {'is' if is_one else 'are'}"


def left_out(steps: list) -> str:
    """Returns which readings are left out, empty if none are.

    Args:
        steps: List of ints, at which the input was not finite.
    """
    if not steps:
        return ""
    of = "steps" if steps[1:] else "step"
    named = format_names((f"{step:,}" for step in steps), 4)
    return (
        f"The input was not finite at {of} {named} (bad data): what it made "
        "infinite or NaN is not counted, since no format mends it."
    )


def spoiled(steps: np.ndarray, events: list) -> np.ndarray:
    """Returns which rows of tables were measured on such batches.

    A long log has one row for several readings, the worst of them, at the step
    of the last. What is not finite in it is of the bad batch, if no other step
    in between was skipped.

    Args:
        steps: Int array, the rising steps of the rows of a family.
        events: List of dicts.
    """
    bad = sorted(bad_input_steps(events))
    if not bad or not len(steps):
        return np.zeros(len(steps), bool)
    # How far a loss scale fell is of a step, too.
    skips = (e for e in events if e["kind"] == "skipped_step")
    failed = {e["at_step"] for e in skips if "at_step" in e}
    gaps = np.diff(steps)
    before = np.concatenate([steps[:1] - 1, steps[:-1]])
    is_pooled = np.concatenate([[False], gaps > gaps.min(initial=2**62)])

    def some(found):
        places = np.searchsorted(sorted(found), [before, steps], "right")
        return places[1] > places[0]

    others = some(failed.difference(bad))
    return np.isin(steps, bad) | (is_pooled & some(bad) & ~others)
