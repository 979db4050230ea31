"""Which loss scale each step ran with, from the counters.

An update rule is a pure function of its state and of whether a step was
finite. So the state at some step and the numbers of the skipped steps since
give every scale in between, without a reading of each.

The counters are read every so many steps. The update rule and the numbers of
the skipped steps say what the scale was after each of those in between.

A scale at step `s` of a log is the one in use after `s` batches: the batch
that Keras counts as `s` runs with it, and a step that is skipped as the `s`th
(`at_step` of its event) changes it there, having run with that of `s - 1`.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from keras_mixprec.loss_scaling.rules import LossScale, LossScaleState


class Replayed(NamedTuple):
    """What a rule did over a stretch of steps.

    Attributes:
        changes: List of `(steps, scale)`: after so many attempted steps the
            scale became another.
        state: The `LossScaleState` at the end.
    """

    changes: list
    state: LossScaleState


def replay(
    rule: LossScale, state: LossScaleState, skipped, until: int
) -> Replayed:
    """Follows a rule over steps that have been taken.

    Args:
        rule: `LossScale`.
        state: The `LossScaleState` to begin with, of NumPy scalars.
        skipped: Numbers of the steps after that which were skipped; they count
            attempted steps from 1.
        until: Int. Number of the last step.

    Returns:
        A `Replayed`.
    """
    changes, skipped = [], {int(step) for step in skipped}
    ends = sorted(step for step in skipped if step + 1 not in skipped)
    starts = sorted(step for step in skipped if step - 1 not in skipped)
    runs = [
        (s, e) for s, e in zip(starts, ends, strict=True) if e > state.steps
    ]
    for start, end in runs:
        state = _follow(rule, state, start - 1, True, changes)
        state = _follow(rule, state, end, False, changes)
    return Replayed(changes, _follow(rule, state, until, True, changes))


def _follow(rule, state, until, finite, changes):
    """The state after steps that were all finite, or all not."""
    while (left := until - int(state.steps)) > 0:
        if unchanged := min(rule.unchanged_for(state, finite), left):
            state = state._replace(
                steps=np.int32(state.steps + unchanged),
                good_steps=np.int32(state.good_steps + unchanged * finite),
            )
            continue
        scale, state = state.scale, rule.next_state(state, finite)
        if state.scale != scale:
            changes.append((int(state.steps), float(state.scale)))
    return state


# A schedule that is computed in a compiled step may round otherwise.
_ROUNDING = 1e-5


class Moment(NamedTuple):
    """The counters of an optimizer at a reading.

    Attributes:
        step: Int. Step of the log.
        state: The `LossScaleState`, of NumPy scalars.
        skipped: Int. Steps skipped so far.
        applied: Int. Steps applied so far.
    """

    step: int
    state: LossScaleState
    skipped: int
    applied: int


class ScalePoint(NamedTuple):
    """A point of the curve of a loss scale; holds until the next.

    Attributes:
        step: Int. Step of the log.
        scale: Float. The scale in use after that many batches.
        skipped: Int. Steps skipped until then.
        applied: Int. Steps applied until then.
    """

    step: int
    scale: float
    skipped: int
    applied: int


@dataclasses.dataclass(frozen=True)
class Block:
    """Steps of a log of which something is not known one by one.

    Attributes:
        first_step, last_step: Int. The first and the last they can be.
        count: Int. How many of these they are.
    """

    first_step: int
    last_step: int
    count: int

    def joined(self, earlier: "Block | None") -> "Block":
        """Returns one block of this and an earlier one.

        Args:
            earlier: `Block`, or `None` if there is none.
        """
        if earlier is None:
            return self
        count = earlier.count + self.count
        return Block(earlier.first_step, self.last_step, count)


class Stretch:
    """The steps between two readings.

    Args:
        rule: The `LossScale` that the optimizer follows.
        before, after: `Moment`.
        numbers: Numbers of the skipped steps in between, rising; the first of
            them may be missing.
        recent: List of `NonfiniteStep`, those of them that are kept in full.
    """

    def __init__(
        self, rule: LossScale, before: Moment, after: Moment, numbers, recent
    ):
        self._rule = rule
        self._before, self._after = before, after
        self._numbers = self._completed(np.asarray(numbers, int))
        self._recent = recent

    @property
    def first_step(self) -> int:
        """The first of the steps, in the log's count."""
        return min(self._before.step + 1, self.last_step)

    @property
    def last_step(self) -> int:
        """The last of the steps, in the log's count."""
        return self._after.step

    @property
    def recent(self) -> list:
        """The `NonfiniteStep`s, with the log's numbers."""
        return [s._replace(step=self._at(s.step)) for s in self._recent]

    @property
    def others(self) -> list[Block]:
        """The skipped steps that are not kept in full: one block or none."""
        count = self._skipped - len(self._recent)
        if not count:
            return []
        first, last = int(self._before.state.steps) + 1, self._after.state.steps
        if self._recent:
            last = self._recent[0].step - 1
        if len(self._numbers) == self._skipped:
            first, last = self._numbers[0], self._numbers[count - 1]
        return [Block(self._at(first), self._at(last), count)]

    def points(self) -> tuple[list, bool]:
        """Returns the `ScalePoint`s, and whether these are all changes.

        They are not where the scale was set by hand in between, or more steps
        were skipped than an optimizer remembers.
        """
        if len(self._numbers) == self._skipped:
            state, until = self._before.state, int(self._after.state.steps)
            replayed = replay(self._rule, state, self._numbers, until)
            if self._ends_as(replayed.state):
                return [self._point(*c) for c in replayed.changes], True
        known = [(step.step - 1, step.scale) for step in self._recent]
        after = self._after.state
        known.append((int(after.steps), float(after.scale)))
        return [self._point(*change) for change in known], False

    @property
    def _skipped(self):
        return self._after.skipped - self._before.skipped

    def _completed(self, numbers):
        """The numbers with the missing ones, if all others were skipped."""
        missing = self._skipped - len(numbers)
        first = int(self._before.state.steps) + 1
        if missing and len(numbers) and numbers[0] == first + missing:
            return np.concatenate([np.arange(first, first + missing), numbers])
        return numbers

    def _ends_as(self, state):
        after = self._after.state
        return state.good_steps == after.good_steps and math.isclose(
            state.scale, after.scale, rel_tol=_ROUNDING
        )

    def _point(self, number, scale):
        before = self._before
        skipped = int(np.searchsorted(self._numbers, number, side="right"))
        applied = number - int(before.state.steps) - skipped
        return ScalePoint(
            self._at(number),
            scale,
            before.skipped + skipped,
            before.applied + applied,
        )

    def _at(self, number):
        """The step of the log at which an attempted step was taken.

        An optimizer may step several times a batch, or not in each.
        """
        before, after = self._before, self._after
        attempted = int(after.state.steps - before.state.steps)
        past = max(int(number - before.state.steps), 0)
        return before.step + -(-past * (after.step - before.step) // attempted)
