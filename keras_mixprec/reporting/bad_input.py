"""Readings of batches that were not finite: no overflow, and no format helps.

A NaN in the inputs makes all activations and gradients behind it NaN, which
looks like an overflow where only numbers are seen. The log names those steps.
"""

from collections.abc import Iterable

import numpy as np

from keras_mixprec.reporting.facts import is_event
from keras_mixprec.reporting.text_formats import parse_json

# What is in the line of each event that is read here, and of those of bad data.
_MARKS = (b'"skipped_step"', b'"bad_batches"', b'"bad_data"')
_BAD = b'"bad_'


def bad_input_steps(events: Iterable[dict]) -> set[int]:
    """Returns the steps whose inputs were not finite, as far as is logged.

    Args:
        events: Dicts that `is_event` accepts.
    """
    return {step for event in events for step in _steps_of(event)}


def _steps_of(event):
    kind, step = event["kind"], event.get("at_step", event["step"])
    if kind == "bad_batches":
        batches = event.get("batches")
        known = filter(_is_batch, batches if isinstance(batches, list) else [])
        yield from (batch["step"] for batch in known)
    elif event.get("bad_input") or event.get("verdict") == "bad_data":
        yield step


def _is_batch(batch):
    return isinstance(batch, dict) and isinstance(batch.get("step"), int)


def mark_spoiled(tables: list, lines: Iterable[str | bytes]):
    """Marks the rows of tables that were measured on such batches.

    A long log has one row for several readings, the worst of them, at the step
    of the last. What is not finite in it is of the bad batch, if no other step
    in between was skipped.

    Args:
        tables: List of `Table`, the tables of a family by rising step.
        lines: Strings or bytes, each event of the log as JSON.
    """
    # Each metric that is shown asks for this, of a log that may have thousands.
    known = (x.encode() if isinstance(x, str) else x for x in lines)
    marked = [line for line in known if any(mark in line for mark in _MARKS)]
    if not any(_BAD in line for line in marked):
        return
    events = [*filter(is_event, (parse_json(line, dict) for line in marked))]
    bad = sorted(bad_input_steps(events))
    if not bad or not tables:
        return
    failed = {e["at_step"] for e in events if "at_step" in e}
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
