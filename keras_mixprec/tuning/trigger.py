"""When non-finite steps are more than the search for the loss scale."""

import math
from collections import deque
from collections.abc import Callable

from keras_mixprec.backend.common import any_worker
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS

# The next batch that fails is diagnosed, which costs no more than a
# diagnosis. Twice as many are waited for if it was but the scale search.
_PATIENCE = 1

# False alarms that may cost what they cost: of non-finite steps, and of steps
# skipped in a row. The others have to be within the overhead budget: of a run
# that diverges nearly every step is bad.
_FALSE_ALARMS = 2, 4

# Beyond those, by how many powers of two the loss scale has to fall below what
# the last diagnosis of a step that failed expects: that is no search.
_FALLEN = 4


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

    def scale_bits(self) -> float:
        """Returns the loss scale now, as a power of two."""
        with self._session.state.counter_log.synchronized():
            return self._session.counters.scale_bits()

    def examined(self):
        """The steps that are skipped now are being diagnosed."""
        self._is_known = self._in_a_row >= TRIGGER_STEPS


class Trigger:
    """Decides when non-finite steps are reason for a diagnosis.

    One non-finite step within 500 triggers a diagnosis; each false alarm, such
    as bad data, doubles how many it takes. A diagnosis that says how far the
    loss scale has to fall explains as many skipped steps.

    Attributes:
        span: Int. Steps that non-finite ones are counted over.
        last_nonfinite_step: Int. The last step at which there were new ones,
            `None` before.
    """

    # A healthy scale search that has found its ceiling loses one step in 2000.
    span = 500

    def __init__(self):
        self._patience = _PATIENCE
        self._false_alarms = 0
        self._seen = deque()
        self._explained = 0
        self._lowest = -math.inf
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
        many = stuck or bad - self._seen[0][1] >= self._patience
        return many and bad > self._explained

    def explain(self, skips: int, bits: float, triggered: bool):
        """The next steps that are skipped are known to be the scale search.

        Args:
            skips: Int. How many it takes, as a diagnosis says.
            bits: Float. The loss scale now, as a power of two.
            triggered: Boolean. Whether the diagnosis was of a step that failed.
        """
        self._explained = self._seen[-1][1] + skips + _SLACK * bool(skips)
        if skips or triggered:
            self._lowest = bits - skips

    def is_overhead(self, in_a_row: bool, bits: Callable) -> bool:
        """Whether the next diagnosis counts as overhead.

        Args:
            in_a_row: Boolean. Whether it is because of skips in a row.
            bits: Function without arguments that returns the loss scale now,
                as a power of two.
        """
        if self._false_alarms < _FALSE_ALARMS[in_a_row]:
            return False
        return bits() > self._lowest - _FALLEN

    def start_over(self):
        """Counts from here on: what there was is known."""
        self._seen = deque([self._seen[-1]] if self._seen else [])

    def false_alarm(self):
        """Waits for twice as many non-finite steps from here on."""
        self._patience *= 2
        self._false_alarms += 1
        self.start_over()
