"""What looking at a run costs, and how much more it may."""

import time
from collections import Counter

# Share of the training time that cannot be timed from here: guarding metrics
# in every step, the hooks' own microseconds, and steps that wait for each other
# when one is looked at.
_UNTIMED = 0.01

# The purpose that gets one half of what may be spent, whatever the others
# take, and no more: a probe is dear, and would never come if looks took all.
LOOKS = "looks"


class Spending:
    """Counts the seconds that `fit` spends beside training.

    Args:
        max_overhead: Float. Share of the time of `fit`, from the second call
            of the train function on, that may be spent; of which 0.01, but at
            most half, is for what is not timed.

    Attributes:
        counted: `collections.Counter`, seconds by purpose.
    """

    def __init__(self, max_overhead: float):
        self.counted = Counter()
        self._share = max_overhead - min(max_overhead / 2, _UNTIMED)
        self._origin = None
        self._uncounted = 0.0
        self._first_step = 0

    def begin(self, step: int):
        """The first call, which compiles, is over; only now seconds count.

        Args:
            step: Int. The number of the next step.
        """
        if self._origin is None:
            self._origin = time.perf_counter()
            self._first_step = step

    @property
    def trained(self) -> float:
        """Seconds of training proper since then."""
        if self._origin is None:
            return 0.0
        elapsed = time.perf_counter() - self._origin
        return elapsed - self._uncounted - self.counted.total()

    def seconds_per_step(self, step: int) -> float:
        """Returns how long a plain step takes on average."""
        return self.trained / max(step - self._first_step, 1)

    def left(self, purpose: str) -> float:
        """Returns the seconds that may be spent on a purpose now."""
        spent = self.counted.total()
        allowed = self._share * (self.trained + spent)
        if purpose == LOOKS:
            return allowed / 2 - self.counted[LOOKS]
        return allowed - spent

    def add(self, purpose: str, seconds: float, counts: bool = True):
        """Takes note of what was spent.

        Args:
            purpose: String.
            seconds: Float.
            counts: Boolean. Whether it counts as overhead; what happens once,
                such as compilation, does not. Defaults to `True`.
        """
        if self._origin is None:
            return
        if counts:
            self.counted[purpose] += seconds
        else:
            self._uncounted += seconds
