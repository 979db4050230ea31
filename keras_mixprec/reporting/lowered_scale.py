"""What a loss scale that fell far has cost: gradients that became zero."""

import math

import numpy as np

from keras_mixprec.formats import format_count, format_share
from keras_mixprec.reporting.layer_tables import layer_of

_ZEROS = "gradient_zero"
# Of the elements of a gradient: less may differ from batch to batch.
_RISE = 0.01


def add_harm(events: list, layers: list, tables: list):
    """Adds to events of a low loss scale what gradients came to at it.

    `"harm"` is a clause: how many layers have more zeros among the gradients
    of their outputs than in any reading before, and which one most. There is
    none where the log has no reading of before.

    Args:
        events: List of dicts, by rising step.
        layers: List of dicts, the table of layers.
        tables: List of `Table`, what was measured of layers.
    """
    low = [
        e for e in events if e["kind"] == "loss_scale_low" and "at_step" in e
    ]
    known = {layer["path"] for layer in layers}
    for event in low:
        before, since = _zeros(
            tables, known, event["at_step"], _end(event, events)
        )
        if not before:
            continue
        event["harm"] = _in_words(before, since)


def _end(event, events):
    """The step at which the scale was back, infinite if it was not."""
    back = (
        e["step"]
        for e in events
        if e["kind"] == "loss_scale_recovered"
        and e.get("optimizer", "") == event.get("optimizer", "")
        and e["step"] > event["step"]
    )
    return next(back, math.inf)


def _zeros(tables, known, start, end):
    """By path the largest share before a step, and that since with its step."""
    before: dict = {}
    since: dict = {}
    for table in tables:
        if _ZEROS not in table.metrics:
            continue
        shares = table.column(_ZEROS, table.layers)
        for step, row in zip(table.steps.tolist(), shares, strict=True):
            if step >= end:
                continue
            for place in np.flatnonzero(~np.isnan(row)).tolist():
                path, share = layer_of(table.layers[place], known), row[place]
                own, found = before if step < start else since, (share, -step)
                own[path] = max(own.get(path, found), found)
    return before, since


def _in_words(before, since):
    both = before.keys() & since.keys()
    if not both:
        return "no gradients were read since"
    rises = {path: since[path][0] - before[path][0] for path in both}
    worse = [path for path, rise in rises.items() if rise > _RISE]
    if not worse:
        return "no layer has had more zeros among its gradients since"
    most = max(worse, key=lambda path: (rises[path], path))
    share, step = since[most]
    return (
        f"since then, {len(worse):,} of {format_count(len(both), 'layer')} "
        f"{'have' if worse[1:] else 'has'} had more zero gradients, {most} "
        f"the most: {format_share(before[most][0])} before, "
        f"{format_share(share)} after step {-step:,}"
    )
