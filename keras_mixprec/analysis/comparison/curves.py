"""The loss curves of a comparison, as its page draws them."""

import math
from typing import NamedTuple

from keras_mixprec.analysis.comparison.intervals import mean
from keras_mixprec.analysis.comparison.record import Comparison
from keras_mixprec.reporting.report_page import COLOURS as PALETTE

# Grey for the first, which the others are compared with; then the tab's.
COLOURS = [
    "#{:02x}{:02x}{:02x}".format(*colour)
    for colour in (PALETTE["quiet"], *PALETTE["category"].values())
]


class Curve(NamedTuple):
    """The losses of one arm.

    Attributes:
        name: String, the arm's.
        steps: List of ints, the last step of each block.
        losses: List of floats, means over blocks and seeds; NaN and infinite
            where one of these is.
    """

    name: str
    steps: list[int]
    losses: list[float]


def curves(record: Comparison) -> list[Curve]:
    """Returns the curves of the arms that have one.

    Args:
        record: The record of a comparison.
    """
    every = record["steps"] // record["blocks"]
    found = []
    for arm in record["arms"]:
        by_seed = [seed["losses"] for seed in arm["seeds"]]
        # One that stopped training early has fewer.
        means = [mean(at) for at in zip(*by_seed, strict=False)]
        steps = [every * (block + 1) for block in range(len(means))]
        if means:
            found.append(Curve(arm["name"], steps, means))
    return found


def limits(shown: list[Curve]) -> tuple[float, float] | None:
    """Returns the losses that a drawing reaches from and to.

    What diverges leaves it, rather than flatten the others.

    Args:
        shown: List of curves, the reference's first.

    Returns:
        Pair of floats; `None` if no loss is finite.
    """
    finite = [[y for y in c.losses if math.isfinite(y)] for c in shown]
    finite = [losses for losses in finite if losses]
    if not finite:
        return None
    low = min(map(min, finite))
    most = 2 * max(finite[0]) - low
    high = min(max(map(max, finite)), max(most, max(finite[0])))
    return low, high if high > low else low + 1.0
