"""The verdicts of a comparison, by statistics of few numbers.

Expected values come from SciPy, and from simulated differences whose truth is
known.
"""

import numpy as np
import pytest
import scipy.stats
from comparison_records import arm, record

from keras_mixprec.analysis.comparison.verdicts import (
    judge_metric,
    median_interval,
)

pytestmark = pytest.mark.one_backend


def verdict(reference, other, **options):
    """The verdict on metrics by seed, of losses that are not the same."""
    arms = [
        arm("float32", reference),
        arm("mixed_bfloat16", other, losses=[3.0]),
    ]
    return judge_metric(arms[1], record(arms, **options))


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 20, 31])
def test_the_interval_of_a_median_is_that_of_scipy(n):
    values = np.random.default_rng(n).lognormal(size=n)
    found = median_interval(values.tolist())
    test = scipy.stats.quantile_test(values, q=0, p=0.5)
    expected = test.confidence_interval(0.95)
    if n >= 6:
        assert found[1:3] == (expected.low, expected.high)
    else:
        assert found[1:3] == (values.min(), values.max())
    low = np.sum(values < found.low)
    outside = scipy.stats.binom.cdf(low, n, 0.5)
    assert found.confidence == pytest.approx(1 - 2 * outside)


@pytest.mark.parametrize("seeds", [2, 5])
def test_a_true_difference_at_the_limit_is_seldom_decided(seeds):
    """Each of the wrong verdicts in 2.5% of comparisons, by construction."""
    random = np.random.default_rng(seeds)
    found = []
    for _ in range(600):
        base = random.normal(0.9, 0.02, seeds)
        worse = base - 0.002 * base.mean() + random.normal(0, 0.003, seeds)
        found.append(verdict(base, worse)["verdict"])
    for name in "within tolerance", "worse":
        assert 0.01 < found.count(name) / 600 < 0.045


@pytest.mark.parametrize("higher", [True, False], ids=["accuracy", "loss"])
def test_a_planted_worse_arm_is_called_worse(higher):
    base = np.array([0.91, 0.93, 0.92])
    worse = base + (-1 if higher else 1) * np.array([0.04, 0.05, 0.045])
    found = verdict(base, worse, metric_higher_is_better=higher)
    assert found["verdict"] == "worse"
    expected = scipy.stats.ttest_rel(worse, base).confidence_interval(0.95)
    difference = found["difference"]
    assert difference["low"] == pytest.approx(expected.low)
    assert difference["high"] == pytest.approx(expected.high)
    better = verdict(worse, base, metric_higher_is_better=higher)
    assert better["verdict"] == "within tolerance"


def test_what_is_not_told_apart_says_how_many_seeds_would_do():
    found = verdict([0.9, 0.92, 0.91], [0.89, 0.925, 0.905])
    assert found["verdict"] == "not told apart"
    assert found["seeds_needed"] > 3
    assert f"about {found['seeds_needed']} seeds" in found["why"]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(100, "not told apart"), (4000, "within tolerance")],
)
def test_a_tie_of_counted_metrics_is_as_sure_as_their_steps(samples, expected):
    """Three accuracies may be equal by chance if few samples are counted."""
    same = [0.91, 0.93, 0.92]
    assert verdict(same, same, metric_samples=samples)["verdict"] == expected


def test_what_a_function_counts_is_as_sure_as_what_its_values_differ_by():
    """It is not known which of the samples are held back."""
    tied = verdict([0.5, 0.5], [0.5, 0.5], metric="mine:accuracy")
    assert tied["verdict"] == "not told apart"
    assert "resolution" in tied["why"]
    near = verdict([0.5, 0.6], [0.5, 0.6], metric="mine:accuracy")
    assert near["verdict"] == "not told apart"
    # A step of 0.1 at most, as if rounded to it: 12.7 * 0.1 / sqrt(6 * 2).
    assert near["difference"]["high"] == pytest.approx(0.367, abs=1e-3)


@pytest.mark.parametrize(
    ("reference", "other", "expected", "why"),
    [
        ([0.9, 0.9], [0.9, np.nan], "worse", " 1 of 2"),
        ([0.9, np.inf], [0.9, 0.9], "not told apart", "reference is not"),
        ([0.9], [0.5], "not told apart", "one seed"),
        ([], [], "not measured", "no seed"),
    ],
)
def test_what_has_no_interval(reference, other, expected, why):
    found = verdict(reference, other)
    assert found["verdict"] == expected
    assert found["difference"] is None
    assert why in found["why"]
