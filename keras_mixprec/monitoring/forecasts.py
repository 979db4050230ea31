"""Predicts overflows from the trend of a layer's headroom."""

import math
from collections import deque

from keras_mixprec.diagnosis import thresholds


class Trend:
    """The headroom of one layer over the last readings.

    Wortsman et al., 2023 (arXiv 2309.14322) predict instabilities from the
    growth of activation norms. This class fits a line to the headroom in bits.
    The layer overflows when the line reaches 0.

    Args:
        count: Int. The number of readings to fit.
    """

    def __init__(self, count: int = thresholds.TREND_POINTS):
        self._points: deque = deque(maxlen=count)

    def add(self, step: int, headroom_bits: float) -> float | None:
        """Adds a reading.

        Args:
            step: Int.
            headroom_bits: Float. Zero or less if the layer overflows already.

        Returns:
            Float. The predicted number of steps until the layer overflows, or
            `None` if no overflow is near.
        """
        if not math.isfinite(headroom_bits):
            return None
        if self._points and self._points[-1][0] == step:
            self._points.pop()
        self._points.append((step, headroom_bits))
        if len(self._points) < (self._points.maxlen or 0):
            return None
        first, slope, now, spread = _line(self._points)
        fallen = slope * first
        if slope >= 0 or fallen < thresholds.TREND_SPREADS * spread:
            return None
        left = max(now, 0.0) / -slope
        return left if left <= thresholds.TREND_AHEAD * -first else None


def _line(points):
    """Fits a line by least squares, ten times as fast as `np.polyfit`.

    Returns the first step minus the last, the slope, the value of the line at
    the last step, and the standard deviation from the line.
    """
    count, (last, _) = len(points), points[-1]
    center = sum(step for step, _ in points) / count
    mean = sum(bits for _, bits in points) / count
    pairs = [(step - center, bits - mean) for step, bits in points]
    slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    spread = sum((y - slope * x) ** 2 for x, y in pairs) / count
    now = mean + slope * (last - center)
    return points[0][0] - last, slope, now, math.sqrt(spread)


# A trend of the headroom over fewer audits is often a coincidence.
_AUDITS = 3


class AuditForecast:
    """Predicts overflows from the headroom at the last audits."""

    def __init__(self):
        self._step = 0
        self._trends: dict = {}
        self._left: dict = {}

    def add(self, step: int, headroom: dict):
        """Adds an audit.

        Args:
            step: Int.
            headroom: Dict from layer path to headroom in bits.
        """
        # A new `fit` may count steps from 0, which makes trends from an earlier
        # `fit` useless.
        before = self._trends if step >= self._step else {}
        self._step = step
        self._trends = {p: before.get(p) or Trend(_AUDITS) for p in headroom}
        left = {p: self._trends[p].add(step, b) for p, b in headroom.items()}
        self._left = {
            path: (steps, headroom[path])
            for path, steps in left.items()
            if steps is not None and headroom[path] >= 0
        }

    def steps_left(self) -> dict:
        """Returns the layers that will overflow soon.

        Returns:
            Dict from layer path to the steps until the overflow and the
            headroom in bits.
        """
        return self._left

    def about_to_overflow(self) -> dict:
        """Returns the layers that may overflow on the next batch.

        Returns:
            Dict, as from `steps_left`.
        """
        return {
            path: (steps, bits)
            for path, (steps, bits) in self._left.items()
            if bits < thresholds.BITS_ABOVE
        }
