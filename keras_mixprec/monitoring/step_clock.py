"""How long steps take, from time stamps of the host."""

import itertools
from collections import deque
from typing import NamedTuple

from keras_mixprec import _clock

# Steps of the first stretch, so that short runs have the time of a step.
_FIRST = 4

# The durations of this many calls are kept, the latest.
_MOST_CALLS = 4096


# A stamp is made when a call of the train function begins: the time in seconds,
# the number of the next step, and the samples in the batches so far. A plain
# tuple is made in a third of the time of a named one.
Stamp = tuple[float, int, int]


class Stretch(NamedTuple):
    """Plain steps in a row, or several such stretches taken together.

    Attributes:
        seconds: Float.
        steps: Int.
        samples: Int.
    """

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0

    def __add__(self, other):
        return Stretch(*map(sum, zip(self, other, strict=True)))


class StepClock:
    """Measures stretches of plain steps.

    On a device that runs on while the host goes ahead, the time between two
    calls is the time that it takes to enqueue a step. So a stretch ends when
    the host looks at the counters, because it waits for all steps so far. A
    step took the time of the stretch divided by its steps. How long that last
    wait was says whether the host was ahead by more than a step. If not, the
    stretch may end at any time stamp, and its steps take the times between its
    stamps.

    A stretch does not contain the last call of an epoch, validation, calls that
    compile, are measured or diagnosed, and the one after these.

    Args:
        model: The `keras.Model`.
        budget: `OverheadBudget`, which counts ranges and diagnoses.
        samples: `SampleCount`.
        wait: Function that waits for all steps so far.

    Attributes:
        behind: Boolean, whether the device was behind the host by more than a
            step at the end of the last stretch that the host waited for;
            `None` before.
        steps_per_call: Int.
    """

    def __init__(self, model, budget, samples, wait):
        self.behind: bool | None = None
        self._model = model
        self._budget = budget
        self._samples = samples
        self._wait = wait
        self.steps_per_call = getattr(model, "steps_per_execution", 1)
        self._stamps = deque(maxlen=_MOST_CALLS)
        self._start: Stamp | None = None
        self._kind: tuple | None = None
        self._compiles = True
        self._sum = Stretch()
        self._durations = deque(maxlen=_MOST_CALLS)

    def stamp(self, step: int):
        """A call of the train function begins; called before each.

        Args:
            step: Int. The number of the next step.
        """
        kind = self._budget.special, self._model.train_function
        self._compiles = not self._kind or kind[1] is not self._kind[1]
        if kind != self._kind:
            # One of the last two calls was special, or this one compiles.
            self._end_early(2)
            self._kind = kind
        elif self._start is not None:
            self._stamps.append(self._now(step))
            if self.behind is None and step >= self._start[1] + _FIRST:
                self._wait()
        else:
            if self.behind is not False:
                self._wait()
            self._begin(step)

    def waited(self, step: int, seconds: float):
        """The host has waited for all steps: here a stretch may end.

        Args:
            step: Int. The number of the next step.
            seconds: Float. How long that took.
        """
        start = self._start
        if start is None or step == start[1]:
            return
        if self._kind and self._budget.special != self._kind[0]:
            self._end_early(2)
            return
        begun, *others = self._stamps[-1]
        steps = step - start[1]
        self.behind = seconds * steps > begun + seconds - start[0]
        end = self._now(step) if self.behind else (begun + seconds, *others)
        self._end(end)

    def go_on(self, step: int):
        """The hooks before a step end: what follows is the next stretch.

        Args:
            step: Int. The number of the next step.
        """
        if self._start is None and not self._compiles:
            self._begin(step)

    def end_epoch(self, known_length: bool):
        """An epoch is over, and validation.

        Args:
            known_length: Boolean, whether every call had a batch. If not, the
                last call only found that no batch is left.
        """
        self._end_early(1 if known_length else 2)

    @property
    def measured(self) -> bool:
        """Returns whether anything was measured since the last `take`."""
        # A clock that stands still measures nothing.
        return self._sum.steps > 0 and self._sum.seconds > 0

    def take(self) -> tuple[Stretch, list[float]]:
        """Returns what was measured since the last call.

        Returns:
            A `Stretch` of all, and how long each of the latest steps took, in
            rising order, none where only enqueuing them was seen.
        """
        total, self._sum = self._sum, Stretch()
        durations = sorted(self._durations)
        self._durations.clear()
        return total, durations

    def _now(self, step):
        return _clock.now(), step, self._samples.total

    def _begin(self, step):
        self._start = self._now(step)
        self._stamps.clear()
        self._stamps.append(self._start)

    def _end_early(self, calls):
        """Ends the stretch before the last `calls` calls."""
        if self.behind is False and len(self._stamps) > calls:
            self._end(self._stamps[-calls])
        self._start = None
        self._stamps.clear()

    def _end(self, end):
        start, self._start = self._start, None
        stamps = [*self._stamps]
        self._stamps.clear()
        self._sum += Stretch(*(b - a for a, b in zip(start, end, strict=True)))
        if self.behind:
            self._durations.clear()
            return
        times = [now for now, step, *_ in stamps if step < end[1]]
        self._durations.extend(
            (b - a) / self.steps_per_call
            for a, b in itertools.pairwise([*times, end[0]])
        )
