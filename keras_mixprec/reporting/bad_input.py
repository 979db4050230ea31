"""Finds batches with non-finite inputs, which no number format repairs.

A NaN in the inputs makes all later activations and gradients NaN, which looks
like an overflow. The log names the steps of such batches, so that reports can
leave their readings out.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from keras_mixprec.formats import format_names


def bad_input_steps(events: Iterable[dict]) -> dict[int, dict]:
    """Returns the steps whose inputs were not finite, as far as logged.

    Args:
        events: Dicts from `read_events`.

    Returns:
        Dict from steps to a dict of the first bad row by part of the batch. The
        inner dict is empty if the row is not known.
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
    """Returns a clause that names the bad batches and the bad samples.

    The diagnosed batch may be later than the first bad batch.

    Args:
        verdict: Dict, an event of kind `"verdict"`.
        events: List of dicts, as in `Facts`.
    """
    steps = bad_input_steps(events)
    counts = [e["count"] for e in events if e["kind"] == "bad_batches"]
    count = max(len(steps), *counts[-1:], 1)
    first = min([*steps, verdict.get("at_step", verdict["step"])])
    when = f"at step {first:,}"
    if count > 1:
        when = f"in {count:,} batches, the first {when}"
    numbers = verdict.get("numbers", {})
    named = []
    for part, rows in _rows(numbers, "samples_of_").items():
        # A verdict lists only the first bad samples, so end the list with "…"
        # if there are more.
        is_cut = numbers.get(f"bad_samples_of_{part}", 0) > len(rows)
        listed = ", ".join(map(str, [*rows, *["…"] * is_cut]))
        named.append(f"row{'s' * (len(rows) > 1)} {listed} of {part}")
    if not named:
        own = {p: x[0] for p, x in _rows(numbers, "rows_of_").items()}
        own = steps.get(first) or own
        named = [f"row {row} of that batch's {p}" for p, row in own.items()]
    said = f" (not finite: {' and '.join(named)})" if named else ""
    return f"bad data {when}{said}"


def _rows(numbers, start):
    """Returns rows by part of the batch, such as `"x"` or an array in it."""
    found = {n.removeprefix(start): n for n in numbers if n.startswith(start)}
    return {part: numbers[n] for part, n in found.items() if numbers[n]}


def left_out(steps: list) -> str:
    """Returns a sentence about readings left out, empty if there are none.

    Args:
        steps: List of ints, the steps with non-finite inputs.
    """
    if not steps:
        return ""
    of = "steps" if steps[1:] else "step"
    named = format_names((f"{step:,}" for step in steps), 4)
    return (
        f"The input was not finite at {of} {named} (bad data). Infinities and "
        "NaNs that it caused are not counted, because no format can avoid them."
    )


def spoiled(steps: np.ndarray, events: list) -> np.ndarray:
    """Returns a mask of the rows that were measured on bad batches.

    In a long log, a row pools several readings and has the step of the last
    reading. A bad batch in the range of steps that a row covers explains the
    row's non-finite numbers, unless a good batch was skipped in that range.

    Args:
        steps: Int array, the rising steps of the rows of a family.
        events: List of dicts.
    """
    bad = sorted(bad_input_steps(events))
    if not bad or not len(steps):
        return np.zeros(len(steps), bool)
    # Read skipped steps only, because other kinds of events may also have
    # `at_step`.
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
