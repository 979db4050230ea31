"""What monitoring costs and may cost: the overhead budget."""

import math
import time
from collections import Counter

from keras_mixprec.backend import active

# Share of the training time that cannot be timed from here: guarding metrics
# and state in every step (0.3% to 1.1% on torch), the hooks' own microseconds,
# and steps that wait for each other when counters are read.
_UNTIMED = 0.0125

# Purposes. Readings of the counters and probes have half of the budget each, no
# more, or one of them would leave nothing to the other: a probe takes as long
# as a hundred readings. A diagnosis has to wait until enough is left of all.
READINGS, PROBES, DIAGNOSES = "readings", "probes", "diagnoses"

# What a run that was never compared with float32 may take for that once it is
# over: as much of it as the ranges of its first steps of theirs.
_COMPARISON = 0.05


class OverheadBudget:
    """Counts the seconds that `fit` spends beside training.

    What it does not limit happens once or a few times in a run: compiling the
    probed step (`probe_schedule._COMPILING`, five times the probes' share),
    ranges of the first steps, which have an allowance of their own
    (`range_schedule._SHARE` and `_SECONDS`), a comparison with float32 at the
    end of a run without one (`_COMPARISON`), the first three audits of a model
    and up to eight that are brought forward (`_AUDITS_AT_ANY_COST` and
    `_HURRIES` of `audit_schedule.py`), the first diagnosis after trouble
    (`audits.Examiner.wants`), and with a tuner the first false alarms
    (`trigger._FALSE_ALARMS`), the loss of one batch before a demotion and after
    it (`tuning/promotion.py`), and validation (`tuning/validation.py`).

    Args:
        max_overhead: Float. Share of the time of `fit`, from the second call
            of the train function on, that may be taken; of which 0.0125, but
            at most half, is for what is not timed. At 1 readings and probes
            have no limit.

    Attributes:
        counted: `collections.Counter`, seconds by purpose.
        once: Float. Seconds of what is no overhead, since it happens once.
        before: Float. Seconds of what came before the second call, as the
            diagnosis before the first step.
        special: Int. How often something else than counters was read: steps
            that are not like others.
    """

    def __init__(self, max_overhead: float):
        self.counted = Counter()
        self._limited = max_overhead < 1
        self._share = max_overhead - min(max_overhead / 2, _UNTIMED)
        self._made = time.perf_counter()
        self._origin: float | None = None
        self.once = self.before = 0.0
        self.special = 0
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
        return elapsed - self.once - self.counted.total()

    @property
    def allows_comparison(self) -> bool:
        """Whether the run, which is over, may be compared with float32 once."""
        if self._origin is None:
            return False
        first_call = self._origin - self._made
        expected = active.replay().FIRST_DIAGNOSIS * first_call
        return expected <= _COMPARISON * self.trained

    @property
    def share(self) -> float:
        """Share of the time since then that counts as overhead."""
        spent = self.counted.total()
        return spent / (self.trained + spent) if spent else 0.0

    def seconds_per_step(self, step: int) -> float:
        """Returns how long a plain step takes on average."""
        return self.trained / max(step - self._first_step, 1)

    def left(self, purpose: str) -> float:
        """Returns the seconds that a purpose may take now."""
        spent = self.counted.total()
        allowed = self._share * (self.trained + spent)
        if purpose == DIAGNOSES:
            return allowed - spent
        if allowed and not self._limited:
            return math.inf
        return allowed / 2 - self.counted[purpose]

    def add(self, purpose: str, seconds: float, is_overhead: bool = True):
        """Takes note of what a purpose took.

        Args:
            purpose: String.
            seconds: Float.
            is_overhead: Boolean. Whether it counts as overhead; what happens
                once, such as compilation, does not. Defaults to `True`.
        """
        self.special += purpose != READINGS or not is_overhead
        if self._origin is None:
            self.before += seconds
        elif is_overhead:
            self.counted[purpose] += seconds  # type: ignore[assignment]
        else:
            self.once += seconds


# Steps after which another diagnosis is made, whatever the last one cost: what
# a layer does wrong by then is to be found, too.
_LONGEST_PAUSE = 256


class Pause:
    """The time after a diagnosis that found what no precision repairs.

    Of a run that diverges nearly every step is bad, and says the same. It lasts
    until the steps since have taken as long as the diagnosis, 256 at the most.

    Args:
        budget: `OverheadBudget`.
    """

    def __init__(self, budget: OverheadBudget):
        self._budget = budget
        self._seconds = -math.inf
        self._step = -1

    def begin(self, step: int, cost: float):
        """Such a diagnosis is over.

        Args:
            step: Int. How many steps were taken.
            cost: Float. Seconds that it took.
        """
        self._seconds = self._budget.trained + cost
        self._step = step + _LONGEST_PAUSE

    def lasts(self, step: int) -> bool:
        """Whether no other one is to be made yet.

        Args:
            step: Int. How many steps were taken.
        """
        return step < self._step and self._budget.trained < self._seconds
