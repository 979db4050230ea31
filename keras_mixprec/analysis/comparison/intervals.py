"""Intervals for few numbers: medians of time ratios, means over seeds.

Pure functions of numbers. SciPy has all of it, and is no dependency of this
package: two quantiles do not make it one.
"""

import functools
import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

CONFIDENCE = 0.95

# That many seeds told apart in four of five comparisons: the usual choice.
_POWER = 0.8

# Beyond it "more than" is answer enough.
MOST_SEEDS = 1000


class Interval(NamedTuple):
    """An estimate, and between which numbers the true one lies.

    Attributes:
        estimate: Float.
        low: Float.
        high: Float.
        confidence: Float. How often such an interval holds the true number.
    """

    estimate: float
    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median and the order statistics that enclose the true one.

    Nothing is supposed about the distribution, which for times is skewed: the
    number of values below the true median is binomial with one half. Below 6
    values even their range holds it less often than in 95%; the interval is
    that range then, and says how often.

    Args:
        values: List of at least one float.

    References:
        - David and Nagaraja, Order Statistics, 3rd edition, section 7.1
        - [Hoefler and Belli, Scientific Benchmarking of Parallel Computing
          Systems, 2015](https://doi.org/10.1145/2807591.2807644), rule 5
    """
    ordered, n = sorted(values), len(values)
    outside, tail = 0, 0.5**n
    while outside < n // 2 - 1:
        wider = tail + math.comb(n, outside + 1) * 0.5**n
        if 2 * wider > 1 - CONFIDENCE:
            break
        outside, tail = outside + 1, wider
    low, high = ordered[outside], ordered[n - 1 - outside]
    return Interval(median(ordered), low, high, 1 - 2 * tail)


def mean_interval(values: Sequence[float], least_spread: float) -> Interval:
    """Returns the mean and its interval of 95%, by Student's t.

    Args:
        values: List of at least two floats.
        least_spread: Float. What the standard deviation is at least, for
            values that are counted in steps: few of them may all be equal by
            chance.
    """
    n, middle = len(values), fmean(values)
    deviation = max(stdev(values), least_spread)
    half = student_t(CONFIDENCE, n - 1) * deviation / math.sqrt(n)
    return Interval(middle, middle - half, middle + half, CONFIDENCE)


def seeds_needed(distance: float, spread: float) -> int | None:
    """Returns how many seeds it takes to tell a mean from a limit.

    Args:
        distance: Float. Of the mean from the limit.
        spread: Float. Standard deviation over seeds.

    Returns:
        Int, such that four of five comparisons tell them apart if the distance
        and the spread are what they seem; `None` for more than 1000.
    """

    def enough(n):
        # Of `_POWER` above the mean, 2 * `_POWER` - 1 are around it.
        both = student_t(CONFIDENCE, n - 1) + student_t(2 * _POWER - 1, n - 1)
        return both * spread <= abs(distance) * math.sqrt(n)

    low, high = 1, MOST_SEEDS
    if not enough(high):
        return None
    while high - low > 1:  # More seeds never need more.
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN or infinite where one of the values is."""
    # `fmean` raises where both infinities are in it.
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float | None:
    """Returns the standard deviation.

    `None` for one value, or where one is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return stdev(values)


@functools.cache
def student_t(confidence: float, degrees: int) -> float:
    """Returns the `t` with `P(|T| <= t) = confidence`.

    By bisection of the finite series that the distribution function is for
    whole degrees of freedom.

    Args:
        confidence: Float between 0 and 1, both exclusive.
        degrees: Int of at least 1. Degrees of freedom.

    References:
        - [Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
          and 26.7.4](https://personal.math.ubc.ca/~cbm/aands/page_948.htm)
    """
    low, high = 0.0, math.pi / 2
    # Each halving is a bit of the angle; a double has 53.
    for _ in range(60):
        angle = (low + high) / 2
        below = _share_within(angle, degrees) < confidence
        low, high = (angle, high) if below else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _share_within(angle, degrees):
    """`P(|T| <= t)` for `t = sqrt(degrees) * tan(angle)`."""
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = total = 0.0 if degrees == 1 else cosine**odd
    for k in range(2 + odd, degrees, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
