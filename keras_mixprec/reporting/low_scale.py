"""A loss scale that fell far below what steps were applied at.

While the rule searches for the scale it falls too, and overflows again each
time it grows. A burst of overflow, or bad data, takes it below what gradients
need, and it grows back by one factor in each growth interval.
"""

import itertools
import math

from keras_mixprec.formats import format_power, get_format

# Less is within what a search for the scale explains.
_FAR_BITS = 8

# Good steps to grow back; less is soon over.
_LONG = 1000

# A scale counts after this many applied steps; one may be chance.
_HELD = 5


class _Course:
    """The scale of one optimizer, as far as it is known."""

    def __init__(self):
        self._start = None
        self._has_grown = False
        # The largest scale that suited gradients, and since when it is less.
        self.held, self.since = 0.0, None
        # True if only bad data have lowered it since.
        self.by_data_alone = True

    def add(self, points, bad: set) -> bool:
        """Follows the scale; returns whether steps are applied at it.

        Args:
            points: List of `ScalePoint`s, beginning with the last one of the
                reading before.
            bad: Steps whose inputs were not finite: that such a step is
                skipped says nothing of its scale.
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
                elif self._has_grown:  # The scale grew to its ceiling.
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
    """Logs loss scales that fell far and have long to grow back.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._courses: dict = {}
        # The last reported scale of each optimizer, until it has recovered.
        self._reported: dict = {}

    def read(
        self, name: str, points: list, bad: set, factor: float, interval: int
    ):
        """Logs that a loss scale is low, or not any more, if that is new.

        Args:
            name: String. Which of several optimizers it is, `""` if there is
                one.
            points: List of `ScalePoint`s since the last reading.
            bad: Set of the steps since then whose inputs were not finite.
            factor: Float, by which the scale grows.
            interval: Int, the good steps after which it grows.
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
    # Half of the smallest subnormal number is rounded to 0.
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
        else "Repair what overflowed, or drop the bad data"
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
        "the scale at once. It grows back sooner with a growth_interval (the "
        "steps without an overflow after which it grows) below "
        f"{interval:,}.",
    }
