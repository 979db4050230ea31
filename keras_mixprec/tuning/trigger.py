"""Decides when non-finite steps are a reason for a diagnosis."""

from collections import deque

from keras_mixprec.backend.common import any_worker
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS

# Until the first false alarm, this many non-finite steps trigger a diagnosis.
_PATIENCE = 1

# While the loss scale is searched, a run may skip this many more steps than a
# diagnosis predicts, because gradients may grow during the first steps.
_SLACK = 3


class Trigger:
    """Decides when non-finite steps are a reason for a diagnosis.

    A non-finite step is one that any worker skipped, or whose loss was not
    finite. One such step triggers a diagnosis. After each false alarm, such as
    bad data, the next diagnosis needs twice as many non-finite steps within 500
    steps. A streak of skipped steps needs the same number, but over all steps
    since the last false alarm.
    If a diagnosis predicts how far the loss scale will fall, the next skipped
    steps are expected and trigger nothing.

    Args:
        watch: The `Watch`.

    Attributes:
        span: Int. Non-finite steps are counted over this many steps.
        last_nonfinite_step: Int. The step of the last reading that found new
            non-finite steps, `None` before that.
    """

    # A healthy dynamic loss scale skips about one step in 2000, so rarely two
    # steps within this span.
    span = 500

    def __init__(self, watch):
        self.last_nonfinite_step = None
        self._watch = watch
        self._total = self._here = self._in_a_row = 0
        self._patience = _PATIENCE
        self._examined_row = False
        self._known = self._explained = 0
        # Pairs of a step and the total number of non-finite steps up to this
        # step, within the span.
        self._seen = deque()

    def count(self) -> int:
        """Updates and returns the total number of non-finite steps."""
        before = self._here
        now = self._watch.counter_log.look()
        self._here = now.nonfinite
        new, self._in_a_row = any_worker(
            self._watch.model, [self._here - before, now.in_a_row]
        )
        self._total += int(new)
        return self._total

    def read(self, step: int) -> bool:
        """Updates the count, and returns whether to make a diagnosis.

        Args:
            step: Int. The number of steps taken.
        """
        self.count()
        if self._seen and self._total > self._seen[-1][1]:
            self.last_nonfinite_step = step
        self._seen.append((step, self._total))
        while self._seen[0][0] < step - self.span:
            self._seen.popleft()
        # A run may get stuck while no diagnosis is allowed, so a streak of
        # skipped steps stays a reason until a diagnosis is made.
        is_stuck = self._in_a_row >= TRIGGER_STEPS
        self._examined_row &= is_stuck
        newly_stuck = is_stuck and not self._examined_row
        since = self._known if newly_stuck else self._seen[0][1]
        enough = self._total - since >= self._patience
        return enough and self._total > self._explained

    def examined(self):
        """Records that the current streak of skipped steps is diagnosed."""
        self._examined_row = self._in_a_row >= TRIGGER_STEPS

    def explain(self, skips: int):
        """Expects the next skipped steps as part of a loss scale search.

        Args:
            skips: Int. The number of skipped steps that a diagnosis predicts.
        """
        self._explained = self._total_read() + skips + _SLACK * bool(skips)

    def start_over(self):
        """Forgets the non-finite steps so far."""
        self._seen = deque(list(self._seen)[-1:])

    def false_alarm(self):
        """Requires twice as many non-finite steps from now on."""
        self._patience *= 2
        self.start_over()
        self._known = self._total_read()

    def _total_read(self):
        return self._seen[-1][1] if self._seen else 0
