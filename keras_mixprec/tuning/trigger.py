"""Decides when non-finite steps are a reason for a diagnosis."""

from collections import deque

from keras_mixprec.backend.common import any_worker
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS

# The number of non-finite steps that trigger a diagnosis, before any false
# alarm.
_PATIENCE = 1

# A search for the loss scale may skip this many more steps than a diagnosis
# expects, because the gradients of the first steps grow.
_SLACK = 3


class Trigger:
    """Decides when non-finite steps are reason for a diagnosis.

    A step counts if any worker skipped it or had a loss that is not finite.
    One within 500 steps triggers a diagnosis. Each false alarm, such as bad
    data, doubles that number. Skipped steps in a row trigger a diagnosis in any
    case, unless there were too few since the last false alarm. If a diagnosis
    says how far the loss scale has to fall, that explains as many skipped
    steps.

    Args:
        watch: The `Watch`.

    Attributes:
        span: Int. Steps that non-finite ones are counted over.
        last_nonfinite_step: Int. The last reading that found new ones, `None`
            before.
    """

    # A healthy scale search that has found its ceiling loses one step in 2000.
    span = 500

    def __init__(self, watch):
        self.last_nonfinite_step = None
        self._watch = watch
        self._total = self._here = self._in_a_row = 0
        self._patience = _PATIENCE
        self._examined_row = False
        self._known = self._explained = 0
        # Pairs of a step and the total then, within the span.
        self._seen = deque()

    def count(self) -> int:
        """Counts, and returns how many non-finite steps there were so far."""
        before = self._here
        now = self._watch.counter_log.look()
        self._here = now.nonfinite
        new, self._in_a_row = any_worker(
            self._watch.model, [self._here - before, now.in_a_row]
        )
        self._total += int(new)
        return self._total

    def read(self, step: int) -> bool:
        """Counts, and returns whether that is reason for a diagnosis.

        Args:
            step: Int. How many steps were taken.
        """
        self.count()
        if self._seen and self._total > self._seen[-1][1]:
            self.last_nonfinite_step = step
        self._seen.append((step, self._total))
        while self._seen[0][0] < step - self.span:
            self._seen.popleft()
        # A run may be stuck while no diagnosis is allowed. It is diagnosed as
        # soon as one is.
        is_stuck = self._in_a_row >= TRIGGER_STEPS
        self._examined_row &= is_stuck
        newly_stuck = is_stuck and not self._examined_row
        since = self._known if newly_stuck else self._seen[0][1]
        enough = self._total - since >= self._patience
        return enough and self._total > self._explained

    def examined(self):
        """Notes that the steps that are skipped now are being diagnosed."""
        self._examined_row = self._in_a_row >= TRIGGER_STEPS

    def explain(self, skips: int):
        """Takes the next skipped steps for a search for the loss scale.

        Args:
            skips: Int. The number of steps, from a diagnosis.
        """
        self._explained = self._total_read() + skips + _SLACK * bool(skips)

    def start_over(self):
        """Forgets the non-finite steps so far."""
        self._seen = deque(list(self._seen)[-1:])

    def false_alarm(self):
        """Waits for twice as many non-finite steps from now on."""
        self._patience *= 2
        self.start_over()
        self._known = self._total_read()

    def _total_read(self):
        return self._seen[-1][1] if self._seen else 0
