"""What a loss scale that fell far has cost: gradients that became zero."""

import math

import numpy as np

from keras_mixprec.formats import format_count, format_share
from keras_mixprec.reporting.layer_tables import layer_of

_ZEROS = "gradient_zero"
# Of the elements of a gradient: less may differ from batch to batch.
_RISE = 0.01


def harm(event: dict, run) -> str:
    """Returns what gradients came to at a low loss scale, in a clause.

    How many layers have more zeros among the gradients of their outputs than in
    any reading before, and which one most. Empty where the log has no reading
    of before.

    Args:
        event: Dict, one of the run's that says that a loss scale is low.
        run: `Run`.
    """
    start = event.get("at_step")
    before, since = _zeros(run, start, _end(event, run)) if start else ({}, {})
    if not before:
        return ""
    both = before.keys() & since.keys()
    if not both:
        return "no gradients were read since"
    rises = {path: since[path][0] - before[path][0] for path in both}
    worse = [path for path, rise in rises.items() if rise > _RISE]
    if not worse:
        return "no layer has had more zeros among its gradients since"
    most = max(worse, key=lambda path: (rises[path], path))
    share, step = since[most]
    had = "have" if worse[1:] else "has"
    return (
        f"since then, {len(worse):,} of {format_count(len(both), 'layer')} "
        f"{had} had more zero gradients, {most} the most: "
        f"{format_share(before[most][0])} before, {format_share(share)} after "
        f"step {-step:,}"
    )


def _end(event, run):
    """The step at which the scale was back, infinite if it was not."""
    name = event.get("optimizer", "")
    back = (
        e["step"]
        for e in run.of_kind("loss_scale_recovered")
        if e.get("optimizer", "") == name and e["step"] > event["step"]
    )
    return next(back, math.inf)


def _zeros(run, start, end):
    """By path the largest share before a step, and that since with its step."""
    before: dict = {}
    since: dict = {}
    known = {*run.paths}
    for table in run.heat:
        if _ZEROS not in table.metrics:
            continue
        shares = table.column(_ZEROS, table.layers)
        for step, row in zip(table.steps.tolist(), shares, strict=True):
            own = before if step < start else since
            for place in np.flatnonzero(~np.isnan(row) & (step < end)).tolist():
                path = layer_of(table.layers[place], known)
                found = row[place], -step
                own[path] = max(own.get(path, found), found)
    return before, since
