"""Forecasts of overflows from how a layer's headroom falls."""

import math
from collections import deque

from keras_mixprec.diagnosis import thresholds


class Trend:
    """The headroom of one layer over the last readings.

    Wortsman et al., 2023 (arXiv 2309.14322) predict instabilities from how
    activation norms grow; an overflow is where the line through their
    logarithms meets the format's maximum.

    Args:
        count: Int. How many readings the line goes through.
    """

    def __init__(self, count: int = thresholds.TREND_POINTS):
        self._points: deque = deque(maxlen=count)

    def add(self, step: int, headroom_bits: float) -> float | None:
        """Adds a reading.

        Args:
            step: Int.
            headroom_bits: Float. Negative or zero if it overflows already.

        Returns:
            Float. In about how many steps the layer overflows. `None` if the
            line does not lead there soon.
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
    """The first step as seen from the last, and the line of least squares.

    For eight points this takes a tenth of the time of `np.polyfit`.
    """
    count, (last, _) = len(points), points[-1]
    center = sum(step for step, _ in points) / count
    mean = sum(bits for _, bits in points) / count
    pairs = [(step - center, bits - mean) for step, bits in points]
    slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    spread = sum((y - slope * x) ** 2 for x, y in pairs) / count
    now = mean + slope * (last - center)
    return points[0][0] - last, slope, now, math.sqrt(spread)


# A line through fewer audits is a coincidence too often.
_AUDITS = 3


class AuditForecast:
    """Foresees overflows from the headroom at the last audits."""

    def __init__(self):
        self._step = 0
        self._trends: dict = {}
        self._left: dict = {}

    def add(self, step: int, headroom: dict):
        """Adds an audit.

        Args:
            step: Int.
            headroom: Dict from path to bits.
        """
        # Another `fit` may count from 0 again.
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
        """Returns a dict from the path of each layer that will overflow soon.

        Each value is a pair: the steps until then, and the headroom left in
            bits.
        """
        return self._left

    def about_to_overflow(self) -> dict:
        """Returns the layers that the next batch could overflow, like above."""
        return {
            path: (steps, bits)
            for path, (steps, bits) in self._left.items()
            if bits < thresholds.BITS_ABOVE
        }
