"""Finds a loss that did not fall although no finding explains it."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from keras_mixprec.formats import format_digits
from keras_mixprec.reporting.facts import SCALE_CHANGES
from keras_mixprec.reporting.headline import is_low
from keras_mixprec.reporting.schema import PRECISION_CHANGES
from keras_mixprec.verdict_kinds import KINDS

# The least number of readings and of steps to judge a loss. A loss with fewer
# may be flat by chance.
_LEAST_READINGS = 6
_LEAST_STEPS = 50

# The number of parts into which a run is split. The means of parts vary less
# than single readings.
_PARTS = 8

# A classifier that guesses between two classes has the loss log(2). A lower
# loss may come from trained weights.
_CHANCE = 0.97 * math.log(2)

# If the loss varies by more than this share of its median, the model learns.
_MOST_SPREAD = 0.05

# The smallest relative fall of the loss that shows in three digits.
_LEAST_FALL = 1e-3

_CHANGES = {*PRECISION_CHANGES, *SCALE_CHANGES}


def flat_loss(
    course: Mapping | None,
    events: Iterable,
    layers: list,
    compared: bool = False,
) -> str:
    """Returns a sentence if the loss did not fall, or an empty string.

    All steps after the last change of precision count, even over several calls
    of `fit`. The result is empty if a finding explains the loss, if the run is
    short, if the loss is low, or if a custom `train_step` may use another loss.

    Args:
        course: Dict of the lists `"steps"` and `"values"`, or `None`.
        events: Dicts, by rising step.
        layers: List of dicts, the table of layers.
        compared: Boolean. True if any layer was compared with float32.
            Defaults to `False`.

    Example:
    >>> from keras_mixprec.reporting.flat_loss import flat_loss
    >>> course = {"steps": [*range(50, 401, 50)], "values": [0.693] * 8}
    >>> flat_loss(course, [], [{"path": "a", "compute_dtype": "float16"}])
    'It did not fall: 0.693 at step 50, 0.693 at step 400. Train in float32 \
as well to see whether precision is the reason.'
    """
    if any(map(_explains, events)):
        return ""
    steps, losses = _readings(course, first=last_change(events))
    if len(steps) < _LEAST_READINGS or steps[-1] - steps[0] < _LEAST_STEPS:
        return ""
    parts = min(_PARTS, len(steps))
    means = np.array([x.mean() for x in np.array_split(losses, parts)])
    if not _is_flat(means):
        return ""
    first = np.array_split(steps, parts)[0][-1]
    ends = loss_at(means[0], first), loss_at(means[-1], steps[-1])
    beside = ", with no layer in 16 bits."
    if is_low(layers):
        beside = ". Train in float32 as well to see whether precision is the "
        beside += "reason."
        if compared:
            beside = ". Its steps agree with float32, so precision is not the "
            beside += "reason."
    return f"It did not fall: {', '.join(ends)}{beside}"


def loss_at(loss: float, step: float) -> str:
    """Formats a loss and its step."""
    shown = format_digits(loss) if math.isfinite(loss) else "not finite"
    return f"{shown} at step {int(step):,}"


def last_change(events: Iterable) -> int:
    """Returns the step of the last change of precision, or 0.

    Args:
        events: Dicts.
    """
    changes = (e for e in events if e["kind"] in _CHANGES)
    return max((e["step"] for e in changes), default=0)


def _explains(event):
    """Returns whether an event explains a flat loss."""
    kind = KINDS.get(event.get("verdict", ""))
    known = kind and (kind.explains or kind.name == "not_learning")
    return event.get("own_step") or known and kind.level == "bad"


def _readings(course, first):
    """Returns the steps and finite losses after the step `first`."""
    course = course or {"steps": [], "values": []}
    pairs = zip(course["steps"], course["values"], strict=True)
    found = [p for p in pairs if first < p[0] and math.isfinite(p[1])]
    return np.reshape(found, (-1, 2)).T


def _is_flat(means):
    level = np.median(means)
    if level < _CHANCE or np.ptp(means) > _MOST_SPREAD * level:
        return False
    early, late = np.array_split(means, 2)
    # Estimate the noise from differences of neighbors, so that a slow fall
    # does not count as noise.
    noise = math.sqrt(np.mean(np.diff(means) ** 2) / 2)
    error = noise * math.sqrt(1 / len(early) + 1 / len(late))
    fall = early.mean() - late.mean()
    return bool(fall <= max(2 * error, _LEAST_FALL * level))
