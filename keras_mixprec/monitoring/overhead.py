"""The overhead budget: the cost of monitoring, and its limit."""

import math
from collections import Counter

from keras_mixprec import _clock

# This share of the training time cannot be timed from here. Guarding metrics
# and state takes 0.3% to 1.1% of every step on torch. The hooks take
# microseconds, and steps wait for each other when counters are read.
_UNTIMED = 0.0125

# Purposes. Readings of the counters and of ranges (`PROBES`) have half of the
# budget each. Without that limit one would leave nothing to the other, because
# ranges take as long as hundreds of readings.
READINGS, PROBES, DIAGNOSES = "readings", "probes", "diagnoses"


class OverheadBudget:
    """Counts the seconds of `fit` that are not training.

    It thins only what repeats: readings of the counters, and of ranges between
    those that are needed. It does not decide what is found, so a busy machine
    finds no less. Diagnoses are counted in steps, see `audit_schedule.py` and
    `tuning/trigger.py`, and readings come whenever there is news, see
    `CounterLog.read_if_due`.

    Args:
        max_overhead: Float. The share of the time of `fit` that may be taken,
            from the second call of the train function on. 0.0125 of it, but at
            most half, is reserved for overhead that is not timed. The value 1
            sets no limit.

    Attributes:
        counted: `collections.Counter`, seconds by purpose.
        once: Float. Seconds of work that happens once, so it is not overhead.
        before: Float. Seconds of what came before the second call, as the
            diagnosis before the first step.
        special: Int. How often something else than counters was read: steps
            that are not like others.
    """

    def __init__(self, max_overhead: float):
        self.counted = Counter()
        self._limited = max_overhead < 1
        self._share = max_overhead - min(max_overhead / 2, _UNTIMED)
        self._paused, self._paused_at = 0.0, None
        self._origin: float | None = None
        self.once = self.before = 0.0
        self.special = 0

    def begin(self):
        """The first call, which compiles, is over; only now seconds count."""
        if self._origin is None:
            self._origin = self.now()

    def now(self) -> float:
        """Returns the seconds of the clock, which stands still in a pause."""
        now = _clock.now() if self._paused_at is None else self._paused_at
        return now - self._paused

    def pause(self):
        """A pause begins, which is neither training nor overhead."""
        if self._paused_at is None:
            self._paused_at = _clock.now()

    def go_on(self):
        """The pause is over."""
        if self._paused_at is not None:
            self._paused += _clock.now() - self._paused_at
            self._paused_at = None

    @property
    def trained(self) -> float:
        """Seconds of training proper since then."""
        if self._origin is None:
            return 0.0
        elapsed = self.now() - self._origin
        return elapsed - self.once - self.counted.total()

    @property
    def share(self) -> float:
        """Share of the time since then that counts as overhead."""
        spent = self.counted.total()
        return spent / (self.trained + spent) if spent else 0.0

    def left(self, purpose: str) -> float:
        """Returns the seconds that a purpose may take now."""
        spent = self.counted.total()
        allowed = self._share * (self.trained + spent)
        if allowed and not self._limited:
            return math.inf
        return allowed / 2 - self.counted[purpose]

    def add(self, purpose: str, seconds: float, is_overhead: bool = True):
        """Takes note of what a purpose took.

        Args:
            purpose: String.
            seconds: Float.
            is_overhead: Boolean, whether it counts as overhead; what happens
                once, such as compilation, does not. Defaults to `True`.
        """
        self.special += purpose != READINGS or not is_overhead
        if self._origin is None:
            self.before += seconds
        elif is_overhead:
            self.counted[purpose] += seconds  # type: ignore[assignment]
        else:
            self.once += seconds
