"""When non-finite steps are more than the search for the loss scale."""

from collections import deque

from keras_mixprec.backend.common import any_worker
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS

# The next batch that fails is diagnosed, which costs no more than a
# diagnosis. Twice as many are waited for if it was but the scale search.
_PATIENCE = 1

# Skips beyond those that a diagnosis expects of a search for the loss scale:
# gradients of the first steps grow, and each diagnosis would expect a few more.
_SLACK = 3


class NonfiniteStepCount:
    """Counts the steps that were skipped or had a loss that is not finite.

    On any worker.

    Args:
        session: The `Session`.

    Attributes:
        total: Int. How many there were, as of the last `count`.
    """

    def __init__(self, session):
        self.total = self._here = self._in_a_row = 0
        self._is_known = False
        self._session = session

    def count(self) -> int:
        """Returns how many there were since the last call."""
        before = self._here
        self._here, in_a_row = self._session.nonfinite_steps()
        self._session.examiner.in_a_row = in_a_row
        new, self._in_a_row = any_worker(
            self._session.model, [self._here - before, in_a_row]
        )
        self.total += int(new)
        return int(new)

    def newly_stuck(self) -> bool:
        """Whether more are skipped in a row than a search explains.

        Until `examined` says that these are: a run that is stuck while no
        diagnosis may be made is diagnosed when one may.
        """
        stuck = self._in_a_row >= TRIGGER_STEPS
        self._is_known &= stuck
        return stuck and not self._is_known

    def examined(self):
        """The steps that are skipped now are being diagnosed."""
        self._is_known = self._in_a_row >= TRIGGER_STEPS


class Trigger:
    """Decides when non-finite steps are reason for a diagnosis.

    One non-finite step within 500 triggers a diagnosis; each false alarm, such
    as bad data, doubles how many it takes. Steps that are skipped in a row do
    so whenever they are, but not before as many since the last false alarm: of
    a run that diverges nearly every step is bad. A diagnosis that says how far
    the loss scale has to fall explains as many skipped steps.

    Attributes:
        span: Int. Steps that non-finite ones are counted over.
        last_nonfinite_step: Int. The last step at which there were new ones,
            `None` before.
    """

    # A healthy scale search that has found its ceiling loses one step in 2000.
    span = 500

    def __init__(self):
        self._patience = _PATIENCE
        self._known = 0
        self._seen = deque()
        self._explained = 0
        self.last_nonfinite_step = None

    def add(self, step: int, bad: int, stuck: bool = False) -> bool:
        """Returns whether this triggers a diagnosis.

        Args:
            step: Int. How many steps were taken.
            bad: Int. How many of them were bad, since whenever.
            stuck: Boolean. Whether more were skipped in a row than a usual
                search for the loss scale explains. Defaults to `False`.
        """
        if self._seen and bad > self._seen[-1][1]:
            self.last_nonfinite_step = step
        self._seen.append((step, bad))
        while self._seen[0][0] < step - self.span:
            self._seen.popleft()
        since = self._known if stuck else self._seen[0][1]
        return bad - since >= self._patience and bad > self._explained

    def explain(self, skips: int):
        """The next steps that are skipped are known to be the scale search.

        Args:
            skips: Int. How many it takes, as a diagnosis says.
        """
        self._explained = self._seen[-1][1] + skips + _SLACK * bool(skips)

    def start_over(self):
        """Counts from here on: what there was is known."""
        self._seen = deque([self._seen[-1]] if self._seen else [])

    def false_alarm(self):
        """Waits for twice as many non-finite steps from here on."""
        self._patience *= 2
        self.start_over()
        self._known = self._seen[-1][1] if self._seen else 0
