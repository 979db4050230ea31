"""Whether an arm's final metric is as good as the reference's.

The reference is the first arm, float32 unless the caller chose another. Seeds
are paired: an arm and the reference start from the same weights and see the
same batches, so that the differences by seed are what has a spread.
"""

import itertools
import math
from statistics import fmean, stdev

from keras_mixprec.analysis.comparison.intervals import (
    MOST_SEEDS,
    Interval,
    mean_interval,
    seeds_needed,
)
from keras_mixprec.analysis.comparison.record import Arm, Comparison, Seed

REFERENCE = "reference"
WITHIN = "within tolerance"
WORSE = "worse"
UNDECIDED = "not told apart"
FAILED = "failed"
NOT_MEASURED = "not measured"


def judge_metric(arm: Arm, record: Comparison) -> dict:
    """Returns the verdict on an arm's metric.

    *Within tolerance*: the interval of the difference lies on the good side of
    what is tolerated, a share of the reference's mean; *worse*: on the bad
    side; *not told apart*: the limit is in it. A metric that is not finite is
    worse where the reference's is finite.

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
        return _verdict(NOT_MEASURED, "no seed was done by both")
    return _not_finite(both) or _same(both) or _tested(both, record)


def pairs(arm: Arm, reference: Arm) -> list[tuple[Seed, Seed]]:
    """Returns what both have done: pairs of the arm's and the reference's."""
    by_seed = {s["seed"]: s for s in reference["seeds"]}
    return [
        (s, by_seed[s["seed"]]) for s in arm["seeds"] if s["seed"] in by_seed
    ]


def _not_finite(both):
    n = len(both)
    lost = [r for _, r in both if not math.isfinite(r["metric"])]
    if lost:
        why = f"the reference's is not finite with {len(lost)} of {n} seeds"
        return _verdict(UNDECIDED, why, seeds=n)
    lost = [a for a, _ in both if not math.isfinite(a["metric"])]
    if lost:
        why = f"not finite with {len(lost)} of {n} seeds"
        return _verdict(WORSE, why, seeds=n)
    return None


def _same(both):
    """No spread has to be guessed of runs that are the same to the last bit."""
    if any(r["losses"] != a["losses"] for a, r in both) or any(
        r["metric"] != a["metric"] or not r["losses"] for a, r in both
    ):
        return None
    why = "the same losses and metric as the reference, to the last bit"
    zero = Interval(0.0, 0.0, 0.0, 1.0)
    return _verdict(WITHIN, why, zero, len(both))


def _tested(both, record):
    n = len(both)
    limit = record["tolerance"] * abs(fmean(r["metric"] for _, r in both))
    sign = -1 if record["metric_higher_is_better"] else 1
    worsening = [sign * (a["metric"] - r["metric"]) for a, r in both]
    if n < 2:
        how_much = f"{record['metric']} {sign * worsening[0]:+.3g}"
        why = f"{how_much} with one seed, which has no spread"
        return _verdict(UNDECIDED, why, seeds=n)
    grid = _grid(both, record)
    if grid is None:
        why = (
            f"{record['metric']} is the same with all seeds though the losses "
            "differ: it is counted, in steps that are not known"
        )
        return _verdict(UNDECIDED, why, seeds=n)
    # Of a difference of two numbers that are rounded to a grid.
    least = grid / math.sqrt(6)
    interval = mean_interval(worsening, least)
    difference = _signed(interval, sign)
    why = f"{record['metric']} {_how_much(difference)}"
    if interval.high <= limit:
        return _verdict(WITHIN, why, difference, n)
    if interval.low > limit:
        return _verdict(WORSE, why, difference, n)
    distance = limit - interval.estimate
    needed = seeds_needed(distance, max(stdev(worsening), least))
    shown = f"about {needed}" if needed else f"more than {MOST_SEEDS}"
    why += f"; {shown} seeds would tell"
    return _verdict(UNDECIDED, why, difference, n, needed)


def _signed(interval, sign):
    low, high = sorted((sign * interval.low, sign * interval.high))
    return Interval(sign * interval.estimate, low, high, interval.confidence)


def _grid(both, record):
    """The step in which the metric is counted, 0 if it is not.

    An accuracy over `samples` is a multiple of one over that; beyond 100,000
    steps float32 does not tell, nor does it matter. On what a function of the
    caller counts is not known: its steps are at most the least that two of its
    values differ by; `None` where no two differ.
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
    # No "-0", which rounding may leave.
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
