"""Whether a loss stood still, which is observed and not explained."""

import math
from collections.abc import Mapping

import numpy as np

from keras_mixprec.formats import format_digits
from keras_mixprec.reporting.facts import SCALE_CHANGES
from keras_mixprec.reporting.run_counts import is_low
from keras_mixprec.reporting.schema import PRECISION_CHANGES

# In fewer readings or steps a loss may stand still by chance.
_LEAST_READINGS = 6
_LEAST_STEPS = 50

# Means are compared of this many parts of a run, which vary less than readings.
_PARTS = 8

# Below log(2), which is that of two classes, no loss of a classifier is chance:
# a run that starts from trained weights may stand still there, and be done.
_CHANCE = 0.97 * math.log(2)

# What is learnt varies by more than this share of itself; chance does not.
_MOST_SPREAD = 0.05

# A fall by less is not seen in the three digits that are shown.
_LEAST_FALL = 1e-3

_CHANGES = {*PRECISION_CHANGES, *SCALE_CHANGES}


def flat_loss(overview: Mapping) -> str | None:
    """Returns that the loss did not fall, in a sentence; `None` if it did.

    Of a log with several fits all of them count, from the last change of a
    precision on. Nothing is said of a run that fails or has skipped most steps,
    which explains it, of a short one, or of a low loss.

    Args:
        overview: Dict, as `RunData.overview` returns it, with the headline.

    Example:
    >>> from keras_mixprec.reporting.flat_loss import flat_loss
    >>> steps, values = [*range(50, 401, 50)], [0.693] * 8
    >>> layer = {"path": "a", "compute_dtype": "float16"}
    >>> flat_loss({
    ...     "loss": {"steps": steps, "values": values}, "events": [],
    ...     "layers": [layer], "skipped": 0, "last_step": 400,
    ...     "headline": {"state": "healthy"},
    ... })
    'The loss did not fall: 0.693 at step 50, 0.693 at step 400. Train in \
float32 as well to see whether precision is the reason.'
    """
    explained = 2 * overview["skipped"] >= overview["last_step"]
    if explained or overview["headline"]["state"] == "failing":
        return None
    steps, losses = _readings(overview, first=_last_change(overview))
    if len(steps) < _LEAST_READINGS or steps[-1] - steps[0] < _LEAST_STEPS:
        return None
    parts = min(_PARTS, len(steps))
    means = np.array([x.mean() for x in np.array_split(losses, parts)])
    if not _is_flat(means):
        return None
    first = np.array_split(steps, parts)[0][-1]
    ends = (
        f"{format_digits(mean)} at step {int(step):,}"
        for mean, step in ((means[0], first), (means[-1], steps[-1]))
    )
    beside = (
        ". Train in float32 as well to see whether precision is the reason."
        if is_low(overview["layers"])
        else ", with no layer in 16 bits."
    )
    return f"The loss did not fall: {', '.join(ends)}{beside}"


def standing_loss(overview: Mapping) -> str | None:
    """Returns that the loss has not fallen since a repair; `None` if it has.

    Args:
        overview: Dict, as `RunData.overview` returns it, with `"flat_loss"`.
    """
    changed = _last_change(overview)
    _, before = _readings(overview, last=changed)
    steps, after = _readings(overview, first=changed)
    if not len(after) or not len(before) and len(after) < _LEAST_READINGS:
        return overview["flat_loss"]
    # Of three neighbours: a fall is no noise.
    bends = np.diff(after, 2)
    noise = math.sqrt(np.mean(bends**2) / 6) if bends.size else 0
    # A repair may raise it, where the fault hid a part of it.
    start = max([*before[-1:], after[0]])
    least = max(2 * noise, _LEAST_FALL * abs(start))
    if start - after[-1] > least or not after[-1]:
        return None
    first = f"{format_digits(before[-1])} before it" if len(before) else ""
    ends = f"{format_digits(after[-1])} at step {int(steps[-1]):,}"
    first = first or f"{format_digits(after[0])} at step {int(steps[0]):,}"
    return f"The loss has not fallen since the repair: {first}, {ends}."


def is_known_since_repair(overview: Mapping) -> bool:
    """Whether a loss that is known before a repair is known after it as well.

    Args:
        overview: Dict, as `RunData.overview` returns it.
    """
    changed = _last_change(overview)
    _, before = _readings(overview, last=changed)
    _, after = _readings(overview, first=changed)
    return bool(len(after)) or not len(before)


def _last_change(overview):
    """The step of the last change of a precision."""
    changes = (e for e in overview["events"] if e["kind"] in _CHANGES)
    return max((e["step"] for e in changes), default=0)


def _readings(overview, first=-1, last=math.inf):
    """Steps and finite losses of the steps behind `first`, up to `last`."""
    course = overview["loss"] or {"steps": [], "values": []}
    pairs = zip(course["steps"], course["values"], strict=True)
    found = [p for p in pairs if first < p[0] <= last and math.isfinite(p[1])]
    return np.reshape(found, (-1, 2)).T


def _is_flat(means):
    level = np.median(means)
    if level < _CHANCE or np.ptp(means) > _MOST_SPREAD * level:
        return False
    early, late = np.array_split(means, 2)
    # Of neighbours a slow fall is no noise, as it would be of all.
    noise = math.sqrt(np.mean(np.diff(means) ** 2) / 2)
    error = noise * math.sqrt(1 / len(early) + 1 / len(late))
    fall = early.mean() - late.mean()
    return bool(fall <= max(2 * error, _LEAST_FALL * level))
