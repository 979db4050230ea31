"""How many steps of a run were skipped, and at which loss scales."""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence


def _counts(course):
    """How many steps were skipped so far, by all runs into the folder."""
    counts = [0, *course["skipped"]]
    # An optimizer that counts from 0 again was made for another run.
    more = (
        now - before if now >= before else now
        for before, now in itertools.pairwise(counts)
    )
    return [*itertools.accumulate(more, initial=0)]


def _skipped(course):
    return _counts(course)[-1]


def share_skipped(scale: Sequence[dict], spans: list) -> float:
    """Returns the share of skipped steps among those of several stretches.

    Of several optimizers that of the one that skipped most.

    Args:
        scale: List of dicts, the loss scale of each optimizer by step.
        spans: List of triples of the step after which a stretch begins, its
            last one, and how many of its steps are meant, which are taken to
            be skipped as often as all.

    Example:
    >>> from keras_mixprec.reporting.skipped_steps import share_skipped
    >>> course = {"steps": [0, 10, 20], "skipped": [0, 10, 15]}
    >>> spans = [(0, 10, 4), (10, 20, 4)]
    >>> share_skipped([course], spans)
    0.75
    >>> other = {"steps": [0, 10, 20], "skipped": [0, 1, 1]}
    >>> share_skipped([course, other], spans)
    0.75
    """
    total = sum(meant for *_, meant in spans)
    if not total:
        return 0.0
    shares = (_share_of(course, spans) / total for course in scale)
    return max([0.0, *shares])


def _share_of(course, spans):
    counts, steps = _counts(course), course["steps"]

    def until(step):
        return counts[bisect.bisect_right(steps, step)]

    return sum(
        meant * min((until(end) - until(begin)) / (end - begin), 1)
        for begin, end, meant in spans
        if end > begin
    )


def batches_skipped(events: list, scale: list) -> int:
    """Returns in how many batches updates were skipped; several may be in one.

    At least: of steps that are not listed one by one, those of the optimizer
    that skipped most.

    Args:
        events: List of dicts.
        scale: List of dicts, the loss scale of each optimizer by step.
    """
    listed = [
        (event.get("optimizer", ""), event["at_step"])
        for event in events
        if event["kind"] == "skipped_step" and "at_step" in event
    ]
    counts = Counter(name for name, _ in set(listed))
    others = [_skipped(c) - counts[c["optimizer"]] for c in scale]
    return len({step for _, step in listed}) + max([0, *others])


def lowest_overflowing_scale(events: list, since: int) -> float | None:
    """Returns the least loss scale at which gradients alone were not finite.

    A loss that is not finite, or a batch, says nothing of the scale.

    Args:
        events: List of dicts.
        since: Int. Steps up to this one are not looked at: dtypes have
            changed after it.

    Returns:
        Float, a power of two as its logarithm; `None` if there was no such
        step.
    """
    scales = [
        event["scale"]
        for event in events
        if event["kind"] == "skipped_step"
        and not (event.get("bad_input") or event.get("loss"))
        and event.get("at_step", event["step"]) > since
        and _is_scale(event.get("scale"))
    ]
    return math.log2(min(scales)) if scales else None


def _is_scale(value):
    return isinstance(value, int | float) and 0 < value < math.inf
