"""How many steps of a run were skipped, and at which loss scales."""

import itertools
import math
from collections import Counter


def _skipped(course):
    """How many steps were skipped, by all runs into the folder."""
    counts = [0, *course["skipped"]]
    # An optimizer that counts from 0 again was made for another run.
    return sum(
        now - before if now >= before else now
        for before, now in itertools.pairwise(counts)
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
