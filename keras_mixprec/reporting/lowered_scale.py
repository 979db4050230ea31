"""The cost of a low loss scale: gradients that became zero."""

import math

import numpy as np

from keras_mixprec.formats import format_count, format_share
from keras_mixprec.reporting.grid import MAX_COLUMNS

# A smaller share of the elements may differ from batch to batch.
_RISE = 0.01


def harm(event: dict, run) -> str:
    """Returns the harm of a low loss scale in a clause.

    It counts the layers with more zero gradients than in any reading before,
    and names the worst. It is empty if there was no reading before.

    Args:
        event: Dict, an event of the run of kind `"loss_scale_low"`.
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
    """The largest share of each layer in these columns."""
    return np.fmax.reduce(grid.worst[:, columns], axis=1, initial=np.nan)


def _end(event, run):
    """The step at which the scale recovered, or infinity."""
    name = event.get("optimizer", "")
    back = (
        e["step"]
        for e in run.of_kind("loss_scale_recovered")
        if e.get("optimizer", "") == name and e["step"] > event["step"]
    )
    return next(back, math.inf)
