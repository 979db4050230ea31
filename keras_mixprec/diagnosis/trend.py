"""Whether a layer is on its way to an overflow."""

from collections import deque

import numpy as np

from keras_mixprec.diagnosis import thresholds


class Trend:
    """The headroom of one layer over the last probed steps.

    Wortsman et al., 2023 (arXiv 2309.14322) predict instabilities from how
    activation norms grow; an overflow is where the line through their
    logarithms meets the format's maximum.
    """

    def __init__(self):
        self._points = deque(maxlen=thresholds.TREND_POINTS)

    def add(self, step: int, headroom_bits: float) -> float | None:
        """Adds a probed step.

        Args:
            step: Int.
            headroom_bits: Float. Negative or zero if it overflows already.

        Returns:
            Float. In about how many steps it overflows if it goes on like
            this, `None` if nothing says that it does, or not soon.
        """
        if not np.isfinite(headroom_bits):
            return None
        self._points.append((step, headroom_bits))
        if len(self._points) < thresholds.TREND_POINTS:
            return None
        steps, bits = np.array(self._points, "float64").T
        steps -= steps[-1]
        slope, now = np.polyfit(steps, bits, 1)
        spread = float(np.std(bits - (slope * steps + now)))
        fallen = slope * steps[0]
        if slope >= 0 or fallen < thresholds.TREND_SPREADS * spread:
            return None
        left = max(now, 0.0) / -slope
        return left if left <= thresholds.TREND_AHEAD * -steps[0] else None
