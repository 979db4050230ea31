"""Judges if an arm's final metric is as good as the reference's.

An arm is one of the compared policies. The reference is the first arm, float32
by default. With the same seed, an arm and the reference start from the same
weights and see the same batches. The spread is the standard deviation of their
differences over all seeds.

The intervals are computed here because SciPy is not a dependency.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

REFERENCE = "reference"
WITHIN = "within tolerance"
WORSE = "worse"
UNDECIDED = "not told apart"
FAILED = "failed"
NOT_MEASURED = "not measured"

CONFIDENCE = 0.95

# The usual statistical power: the probability of finding a difference that
# exists.
_POWER = 0.8


class Interval(NamedTuple):
    """An estimate and its confidence interval.

    Attributes:
        estimate: Float.
        low: Float.
        high: Float.
        confidence: Float. The probability that such an interval contains the
            true value.
    """

    estimate: float
    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median and its confidence interval, for any distribution.

    Step times are skewed, so a normal distribution cannot be assumed. The
    number of values below the true median is binomial with p = 1/2, so two of
    the sorted values bound the interval. Fewer than 6 values cannot give 95%
    confidence. The interval is then the range of the values, and `confidence`
    is lower.

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


def mean_interval(values: Sequence[float], spread: float) -> Interval:
    """Returns the mean and its 95% confidence interval, by Student's t.

    Args:
        values: List of at least two floats.
        spread: Float. The standard deviation of the values.
    """
    n, middle = len(values), fmean(values)
    half = _student_t(n - 1) * spread / math.sqrt(n)
    return Interval(middle, middle - half, middle + half, CONFIDENCE)


def seeds_needed(distance: float, spread: float) -> int | None:
    """Estimates how many seeds are needed to tell a mean from a limit.

    Args:
        distance: Float. The distance of the mean from the limit.
        spread: Float. Standard deviation over seeds.

    Returns:
        Int. With this number of seeds, four of five comparisons reach a
        verdict, provided that `distance` and `spread` are the true values.
        `None` if the distance is 0, or if nobody would train so often.

    References:
        - Guenther, Sample Size Formulas for Normal Theory T Tests, The
          American Statistician 35 (1981)
    """
    if not distance:
        return None
    tail, power = map(NormalDist().inv_cdf, ((1 + CONFIDENCE) / 2, _POWER))
    found = math.ceil(((tail + power) * spread / distance) ** 2 + tail**2 / 2)
    return found if found <= _MOST_SEEDS else None


_MOST_SEEDS = 1000

# Quantiles of Student's t, with `P(|T| <= t) = 0.95`, for 1 to 9 degrees of
# freedom.
_T = (
    *(12.706205, 4.3026527, 3.1824463, 2.7764451, 2.5705818),
    *(2.4469119, 2.3646243, 2.3060041, 2.2621572),
)


def _student_t(degrees):
    """Returns Student's t with `P(|T| <= t) = 0.95`, to four digits."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    # The quantile of Student's t: Abramowitz and Stegun, Handbook of
    # Mathematical Functions, 26.7.5.
    first = (z**3 + z) / (4 * degrees)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def judge_metric(arm: dict, record: dict) -> dict:
    """Returns the verdict on an arm's metric.

    The limit is the tolerance times the mean of the reference's metric. The arm
    is within tolerance if the whole interval of the difference is on the good
    side of the limit. The arm is worse if the interval is on the bad side. It
    is undecided if the limit is inside the interval. A non-finite metric is
    worse than a finite one.

    Args:
        arm: One of the record's arms.
        record: The whole record.

    Returns:
        Dict: `verdict`, `why` (a phrase), `difference` (arm minus reference
        as dict of `estimate`, `low`, `high`, `confidence`; `None` without an
        interval), `seeds`, `seeds_needed` (`None` if not known).
    """
    reference = record["arms"][0]
    if arm["status"] != "done":
        return _verdict(FAILED, str(arm["error"]))
    if arm is reference:
        return _verdict(REFERENCE, "", seeds=len(arm["seeds"]))
    if reference["status"] != "done":
        return _verdict(NOT_MEASURED, f"{reference['name']} failed")
    both = pairs(arm, reference)
    if not both:
        return _verdict(NOT_MEASURED, "no seed is finished with both policies")
    return _not_finite(both) or _same(both) or _tested(both, record)


def pairs(arm: dict, reference: dict) -> list[tuple[dict, dict]]:
    """Returns pairs of results with equal seeds, the arm's result first."""
    by_seed = {s["seed"]: s for s in reference["seeds"]}
    return [
        (s, by_seed[s["seed"]]) for s in arm["seeds"] if s["seed"] in by_seed
    ]


def _not_finite(both):
    n = len(both)
    ours, theirs = (
        sum(not math.isfinite(s["metric"]) for s in side)
        for side in zip(*both, strict=True)
    )
    if theirs:
        why = f"the reference is not finite for {theirs} of {n} seeds"
        return _verdict(UNDECIDED, why, seeds=n)
    if ours:
        why = f"the metric is not finite for {ours} of {n} seeds"
        return _verdict(WORSE, why, seeds=n)
    return None


def _same(both):
    """Returns a verdict if all runs are equal bit for bit, else `None`."""
    if not all(
        r["losses"] and all(r[key] == a[key] for key in ("losses", "metric"))
        for a, r in both
    ):
        return None
    why = "its losses and metric equal the reference's bit for bit"
    return _verdict(WITHIN, why, Interval(0.0, 0.0, 0.0, 1.0), len(both))


def _tested(both, record):
    n, name = len(both), record["metric"]
    differences = [a["metric"] - r["metric"] for a, r in both]
    if n < 2:
        why = f"{name} {differences[0]:+.3g} for one seed; pass more `seeds`"
        return _verdict(UNDECIDED, why, seeds=n)
    grid = _grid(both, record)
    if grid is None:
        why = (
            f"{name} is equal for all seeds although the losses differ, so its "
            "resolution is unknown"
        )
        return _verdict(UNDECIDED, why, seeds=n)
    # A few rounded numbers may be equal by chance, so never take a spread below
    # the one that rounding alone causes.
    spread = max(stdev(differences), grid / math.sqrt(6))
    interval = mean_interval(differences, spread)
    why = f"{name} {_how_much(interval)}"
    limit = record["tolerance"] * abs(fmean(r["metric"] for _, r in both))
    worse = interval
    if record["metric_higher_is_better"]:
        worse = Interval(-interval[0], -interval[2], -interval[1], CONFIDENCE)
    if worse.high <= limit:
        return _verdict(WITHIN, why, interval, n)
    if worse.low > limit:
        return _verdict(WORSE, why, interval, n)
    needed = seeds_needed(limit - worse.estimate, spread)
    why += f"; about {needed} seeds would decide" if needed else ""
    return _verdict(UNDECIDED, why, interval, n, needed)


def _grid(both, record):
    """Returns the resolution of a metric that counts samples, else 0.

    An accuracy is a multiple of `1 / samples`. Above 100,000 samples, the
    resolution does not matter. A caller's function may count any number of
    samples, so its resolution is the smallest difference between two of its
    values, or `None` if all are equal.
    """
    values = sorted(seed["metric"] for pair in both for seed in pair)
    if ":" in record["metric"]:
        gaps = (b - a for a, b in itertools.pairwise(values) if b > a)
        return min(gaps, default=None)
    samples = record["metric_samples"]
    if samples > 100_000:
        return 0.0
    counts = [value * samples for value in values]
    counted = all(abs(c - round(c)) < 0.02 for c in counts)
    return 1 / samples if counted else 0.0


def _how_much(interval):
    *numbers, confidence = interval
    # Adding 0.0 turns -0.0 into 0.0, so that no "-0" is shown.
    estimate, low, high = (f"{x + 0.0:+.3g}" for x in numbers)
    return f"{estimate} ({low} to {high}, {confidence:.0%})"


def _verdict(verdict, why, interval=None, seeds=0, needed=None):
    return {
        "verdict": verdict,
        "why": why,
        "difference": interval and interval._asdict(),
        "seeds": seeds,
        "seeds_needed": needed,
    }
