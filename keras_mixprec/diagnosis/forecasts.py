"""Forecasts of overflows from how a layer's headroom falls."""

import math
from collections import deque

from keras_mixprec.diagnosis import thresholds


class ProbeForecast:
    """The headroom of one layer over the last readings.

    Wortsman et al., 2023 (arXiv 2309.14322) predict instabilities from how
    activation norms grow; an overflow is where the line through their
    logarithms meets the format's maximum.
    """

    def __init__(self):
        self._points = deque(maxlen=thresholds.TREND_POINTS)

    def add(self, step: int, headroom_bits: float) -> float | None:
        """Adds a reading.

        Args:
            step: Int.
            headroom_bits: Float. Negative or zero if it overflows already.

        Returns:
            Float. In about how many steps it overflows if it goes on like
            this, `None` if nothing says that it does, or not soon.
        """
        if not math.isfinite(headroom_bits):
            return None
        self._points.append((step, headroom_bits))
        if len(self._points) < thresholds.TREND_POINTS:
            return None
        first, slope, now, spread = _line(self._points)
        fallen = slope * first
        if slope >= 0 or fallen < thresholds.TREND_SPREADS * spread:
            return None
        left = max(now, 0.0) / -slope
        return left if left <= thresholds.TREND_AHEAD * -first else None


def _line(points):
    """The first step as seen from the last, and the line of least squares.

    Of eight points, as here, in a tenth of the time that `np.polyfit` takes.
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
_POINTS = 3


class AuditForecast:
    """Foresees overflows from the headroom at several audits.

    A layer is about to overflow if its headroom fell from audit to audit, less
    is left than the next batch may take, and the line leads to zero soon.
    """

    def __init__(self):
        self._points = {}

    def add(self, step: int, headroom: dict):
        """Adds an audit.

        Args:
            step: Int.
            headroom: Dict from path to bits.
        """
        # Another `fit` may count from 0 again.
        if any(step < points[-1][0] for points in self._points.values()):
            self._points = {}
        self._points = {
            path: deque(self._points.get(path, ()), _POINTS)
            for path in headroom
        }
        for path, bits in headroom.items():
            points = self._points[path]
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, bits))

    def steps_left(self) -> dict:
        """Returns when layers overflow, a dict from the path of each that will.

        To a pair: steps until then, and the headroom in bits that is left now.
        """
        found = {path: _left(points) for path, points in self._points.items()}
        return {path: left for path, left in found.items() if left}

    def about_to_overflow(self) -> dict:
        """Returns those of `steps_left` that the next batch could overflow."""
        return {
            path: (steps, bits)
            for path, (steps, bits) in self.steps_left().items()
            if bits < thresholds.BITS_ABOVE
        }


def _left(points):
    """Steps and bits left along the line, `None` if it leads nowhere near."""
    bits = [bits for _, bits in points]
    falls = all(a > b for a, b in zip(bits, bits[1:], strict=False))
    if len(bits) < _POINTS or not falls or bits[-1] < 0:
        return None
    length = points[-1][0] - points[0][0]
    steps = bits[-1] * length / (bits[0] - bits[-1])
    soon = steps <= thresholds.TREND_AHEAD * length
    return (steps, bits[-1]) if soon else None
