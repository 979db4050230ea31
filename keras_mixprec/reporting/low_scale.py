"""Reports a loss scale that fell far below the values at which steps succeeded.

A loss scale also falls while its rule searches for the best value, which is
normal. After a burst of overflows or bad data, the scale may be lower than
gradients need. The scale then grows back by only one factor per growth
interval.
"""

import itertools
import math

from keras_mixprec.formats import format_power, get_format

# The least fall to report, in bits. A search for the loss scale explains
# smaller falls.
_FAR_BITS = 8

# The least number of good steps that a reported loss scale needs to grow back.
_LONG = 1000

# A loss scale counts as good after this many applied steps. A single step may
# succeed by chance.
_HELD = 5


class _Course:
    """The history of one optimizer's loss scale."""

    def __init__(self):
        self._start = None
        self._has_grown = False
        # The largest good loss scale, and the step at which the scale fell
        # below that value.
        self.held, self.since = 0.0, None
        # True if bad data alone has lowered the scale since that step.
        self.by_data_alone = True

    def add(self, points, bad: set) -> bool:
        """Adds points, and returns whether steps succeed at the new scale.

        Args:
            points: List of `ScalePoint`s. The first is the last point of the
                previous reading.
            bad: Set of steps with non-finite inputs, which fail at any scale.
        """
        self._start = self._start or points[0]
        for before, now in itertools.pairwise(points):
            scale = before.scale
            if self._lasts(now):
                self.held = max(self.held, scale)
            if now.scale == scale:
                continue
            if now.scale < scale:
                if now.step in bad:
                    self.held = max(self.held, scale)
                elif (
                    self._has_grown
                ):  # The last growth of the scale was too much.
                    self.held = now.scale
                if scale >= self.held:
                    self.since, self.by_data_alone = now.step, True
                self.by_data_alone &= now.step in bad
            self._has_grown = now.scale > scale
            self._start = now
        return self._lasts(points[-1])

    def _lasts(self, now):
        return now.applied - self._start.applied >= _HELD

    def is_low(self, scale) -> bool:
        return self.held > 0 and math.log2(self.held / scale) >= _FAR_BITS


class LowScales:
    """Logs loss scales that fell far and need many steps to grow back.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._courses: dict = {}
        # The last reported scale of each optimizer whose scale is still low.
        self._reported: dict = {}

    def read(
        self, name: str, points: list, bad: set, factor: float, interval: int
    ):
        """Logs when a loss scale becomes low, and when it recovers.

        Args:
            name: String. The optimizer's name, `""` for a single optimizer.
            points: List of `ScalePoint`s since the last reading.
            bad: Set of steps since the last reading with non-finite inputs.
            factor: Float. The growth factor of the scale.
            interval: Int. The growth interval, in good steps.
        """
        course = self._courses.setdefault(name, _Course())
        settled = course.add(points, bad)
        step, now, *_ = points[-1]
        if not course.is_low(now):
            if self._reported.pop(name, None):
                event = {"kind": "loss_scale_recovered", "optimizer": name}
                self._log.event(step, event | {"scale": now})
        elif settled and now < self._reported.get(name, math.inf):
            event = _event(name, course, now, factor, interval)
            if event["good_steps"] >= _LONG:
                self._log.event(step, event)
                self._reported[name] = now


def _event(name, course, scale, factor, interval):
    bits = math.log2(course.held / scale)
    good_steps = math.ceil(bits / math.log2(factor)) * interval
    # Numbers up to half of the smallest subnormal number round to 0.
    lost = get_format("float16").smallest_subnormal / 2 / scale
    of = f" of {name}" if name else ""
    held = format_power(course.held)
    by_data = course.by_data_alone
    fell = (
        f"bad data lowered the loss scale{of}"
        if by_data
        else f"the loss scale{of} fell"
    )
    remedy = (
        "Drop the bad data"
        if by_data
        else "Repair the layer that overflowed, or drop the bad data"
    )
    return {
        "kind": "loss_scale_low",
        "optimizer": name,
        "at_step": course.since,
        "held": course.held,
        "scale": scale,
        "growth_interval": interval,
        "good_steps": good_steps,
        "cause": "bad_data" if by_data else "overflow",
        "message": f"{fell} from {held} to {format_power(scale)}, from step "
        f"{course.since:,} on; the scale needs {good_steps:,} steps without "
        "an overflow to grow back",
        "advice": f"Gradients below {format_power(lost)} become 0 in "
        f"float16 at this scale. {remedy}. Then "
        f"optimizer.set_loss_scale({held.replace('2**', '2.0**')}) restores "
        "the scale at once. To let it grow back sooner, set a growth_interval "
        "(the number of steps without an overflow before it grows) below "
        f"{interval:,}.",
    }
