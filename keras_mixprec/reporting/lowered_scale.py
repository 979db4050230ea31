"""What a loss scale that fell far has cost: gradients that became zero."""

import math

import numpy as np

from keras_mixprec.formats import format_count, format_share
from keras_mixprec.reporting.grid import MAX_COLUMNS

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
    try:
        grid = run.grid("gradient_zero", MAX_COLUMNS)
    except KeyError:
        return ""
    start = event.get("at_step", 0)
    since = (grid.last >= start) & (grid.last < _end(event, run))
    before = _most(grid, grid.last < start)
    after = _most(grid, since)
    rises = after - before
    known, worse = ~np.isnan(rises), rises > _RISE
    if np.isnan(before).all():
        return ""
    if not known.any():
        return "no gradients were read since"
    if not worse.any():
        return "no layer has had more zeros among its gradients since"
    row = np.nanargmax(rises)
    step = grid.last[since][np.nanargmax(grid.worst[row, since])]
    share, had = before[row], "have" if worse.sum() > 1 else "has"
    return (
        f"since then, {worse.sum():,} of {format_count(known.sum(), 'layer')} "
        f"{had} had more zero gradients, {grid.layers[row]} the most: "
        f"{format_share(share)} before, {format_share(after[row])} after step "
        f"{step:,}"
    )


def _most(grid, columns):
    """The largest share of each layer in some columns."""
    return np.fmax.reduce(grid.worst[:, columns], axis=1, initial=np.nan)


def _end(event, run):
    """The step at which the scale was back, infinite if it was not."""
    name = event.get("optimizer", "")
    back = (
        e["step"]
        for e in run.of_kind("loss_scale_recovered")
        if e.get("optimizer", "") == name and e["step"] > event["step"]
    )
    return next(back, math.inf)
