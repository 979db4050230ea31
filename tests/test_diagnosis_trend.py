"""A layer on its way to an overflow is told from one that is not."""

import numpy as np
import pytest

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.forecasts import ProbeForecast

STEPS = range(0, 1000, 100)


def said(headrooms):
    trend = ProbeForecast()
    return [trend.add(*point) for point in zip(STEPS, headrooms, strict=False)]


def test_a_steady_fall_is_predicted():
    # One bit in 100 steps, and three bits left at the end.
    answers = said(np.arange(12, 2, -1.0))
    assert answers[: thresholds.TREND_POINTS - 1] == [None] * 7
    assert answers[-1] == pytest.approx(300)


def test_noise_about_a_level_is_none():
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(6.0, 0.5, size=10)
        assert said(noise) == [None] * 10


@pytest.mark.parametrize(
    "headrooms",
    [
        np.arange(2.0, 12.0),
        np.full(10, 5.0),
        np.linspace(14, 13, 10),
        np.full(10, np.inf),
        np.full(10, np.nan),
    ],
    ids=["grows", "level", "too far ahead", "zeros", "unknown"],
)
def test_no_reason_to_worry(headrooms):
    assert said(headrooms) == [None] * 10


def test_what_overflows_already_has_no_steps_left():
    assert said(np.arange(6, -4, -1.0))[-1] == 0
