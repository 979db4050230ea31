"""Measures step times, and limits the overhead of monitoring."""

import itertools
import math
from collections import Counter, deque

import keras

from keras_mixprec import _clock
from keras_mixprec.backend import active
from keras_mixprec.monitoring.ranges import in_16_bits
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.performance import rates_of

# After this many rows in the log, the speed is logged half as often.
_ROWS = 128

# The first timed stretch of steps ends after 4 steps, so that short runs get a
# step time too.
_FIRST = 4

# Percentiles of the step time are computed over at most this many of the latest
# calls to the train function.
_MOST_CALLS = 4096

# This share of the training time is reserved for overhead that cannot be timed
# from Python: the metric guard takes 0.3% to 1.1% of every step on torch, and
# reading counters interrupts the queue of steps.
_UNTIMED = 0.0125

# Reading counters and reading ranges (`PROBES`) get half of the overhead budget
# each. One reading of ranges takes as long as hundreds of readings of counters,
# and would otherwise leave no budget for the counters.
READINGS, PROBES, DIAGNOSES = "readings", "probes", "diagnoses"


class OverheadBudget:
    """Counts the seconds of `fit` that are overhead, and limits them.

    The budget limits only routine work: reading counters that have not changed,
    and extra readings of ranges. Findings do not depend on the budget, so a
    slow machine finds the same faults. Diagnoses are scheduled by step count
    (see `audit_schedule.py` and `tuning/trigger.py`), and changed counters are
    always read (see `CounterLog.read_if_due`).

    Args:
        max_overhead: Float. The overhead that is allowed, as a share of the
            time of `fit` after the first call to the train function. Up to half
            of this share, but at most 0.0125, is reserved for overhead that
            cannot be timed. `1` sets no limit.

    Attributes:
        counted: `collections.Counter` of seconds by purpose.
        once: Float. Seconds of work that happens once, which is not overhead.
        before: Float. Seconds of work before the second call to the train
            function, such as the first diagnosis.
        special: Int. The number of tasks other than reading counters. Steps
            next to such a task take longer, so they are not timed.
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
        """Starts to count, after the first call, which compiles."""
        if self._origin is None:
            self._origin = self.now()

    def now(self) -> float:
        """Returns the current time in seconds, without pauses."""
        now = _clock.now() if self._paused_at is None else self._paused_at
        return now - self._paused

    def pause(self):
        """Starts a pause, which counts as neither training nor overhead."""
        if self._paused_at is None:
            self._paused_at = _clock.now()

    def go_on(self):
        """Ends a pause."""
        if self._paused_at is not None:
            self._paused += _clock.now() - self._paused_at
            self._paused_at = None

    @property
    def trained(self) -> float:
        """Seconds of training since `begin`, without overhead."""
        if self._origin is None:
            return 0.0
        elapsed = self.now() - self._origin
        return elapsed - self.once - self.counted.total()

    @property
    def share(self) -> float:
        """Overhead as a share of the time since `begin`."""
        spent = self.counted.total()
        return spent / (self.trained + spent) if spent else 0.0

    def left(self, purpose: str) -> float:
        """Returns the seconds that are left for a purpose."""
        spent = self.counted.total()
        allowed = self._share * (self.trained + spent)
        if allowed and not self._limited:
            return math.inf
        return allowed / 2 - self.counted[purpose]

    def add(self, purpose: str, seconds: float, is_overhead: bool = True):
        """Adds the seconds that a purpose took.

        Args:
            purpose: String.
            seconds: Float.
            is_overhead: Boolean, whether the seconds count as overhead. Work
                that happens once, such as compilation, does not. Defaults to
                `True`.
        """
        self.special += purpose != READINGS or not is_overhead
        if self._origin is None:
            self.before += seconds
        elif is_overhead:
            self.counted[purpose] += seconds  # type: ignore[assignment]
        else:
            self.once += seconds


class StepClock:
    """Measures step times over stretches of undisturbed steps.

    A GPU runs asynchronously: the time between two calls on the host is only
    the time to enqueue a step. A stretch therefore ends when the host reads the
    counters, because it then waits for all steps. The step time is the time of
    the stretch divided by its number of steps. A long wait at the end shows
    that the device was behind by more than a step. If the device was not
    behind, each call is timed on its own, and the stretch may end at any call.

    A stretch leaves out validation, the last call of an epoch, and each call in
    which the train function compiles, ranges are read or a batch is diagnosed.
    The call after each of these is left out too.

    Args:
        model: The `keras.Model`.
        budget: `OverheadBudget`, which counts readings of ranges and diagnoses.
        wait: Function that waits for all enqueued steps.

    Attributes:
        behind: Boolean, whether the device was behind the host by more than a
            step at the last wait; `None` before.
        steps_per_call: Int.
    """

    def __init__(self, model, budget, wait):
        self.behind: bool | None = None
        self._model = model
        self._budget = budget
        self._wait = wait
        self.steps_per_call = getattr(model, "steps_per_execution", 1)
        self._stamps = deque(maxlen=_MOST_CALLS)
        # The start time of the first call in the current stretch, and the step
        # of this call.
        self._start: tuple[float, int] | None = None
        self._kind: tuple | None = None
        self._compiles = True
        self._steps, self._seconds = 0, 0.0
        self._durations = deque(maxlen=_MOST_CALLS)

    def stamp(self, step: int):
        """Records the start of a call to the train function.

        Args:
            step: Int. The number of the next step.
        """
        kind = self._budget.special, self._model.train_function
        self._compiles = not self._kind or kind[1] is not self._kind[1]
        if kind != self._kind:
            # Work other than training slowed down one of the last two calls to
            # the train function, or the current call compiles, so do not time
            # these calls.
            self._end_early(2)
            self._kind = kind
        elif self._start is not None:
            self._stamps.append((_clock.now(), step))
            if self.behind is None and step >= self._start[1] + _FIRST:
                self._wait()
        else:
            if self.behind is not False:
                self._wait()
            self._begin(step)

    def waited(self, step: int, seconds: float):
        """Ends a stretch, after the host has waited for all steps.

        Args:
            step: Int. The number of the next step.
            seconds: Float. The duration of the wait.
        """
        start = self._start
        if start is None or step == start[1]:
            return
        if self._kind and self._budget.special != self._kind[0]:
            self._end_early(2)
            return
        begun, last = self._stamps[-1]
        steps = step - start[1]
        self.behind = seconds * steps > begun + seconds - start[0]
        at_stamp = begun + seconds, last
        self._end((_clock.now(), step) if self.behind else at_stamp)

    def go_on(self, step: int):
        """Starts a stretch, after the hooks before a step.

        Args:
            step: Int. The number of the next step.
        """
        if self._start is None and not self._compiles:
            self._begin(step)

    def end_epoch(self, known_length: bool):
        """Ends a stretch at the end of an epoch.

        Args:
            known_length: Boolean, whether the length of the epoch is known. If
                not, the last call had no batch, so it is left out.
        """
        self._end_early(1 if known_length else 2)

    @property
    def measured(self) -> bool:
        """Returns whether anything was measured since the last `take`."""
        # The host's clock may be too coarse to measure any time.
        return self._steps > 0 and self._seconds > 0

    def take(self) -> tuple[int, float, list[float]]:
        """Returns the measurements since the last call.

        Returns:
            The number of steps, their total time in seconds, and the sorted
            times of the latest steps. The list is empty if the steps ran
            asynchronously and could not be timed one by one.
        """
        found = self._steps, self._seconds, sorted(self._durations)
        self._steps, self._seconds = 0, 0.0
        self._durations.clear()
        return found

    def _begin(self, step):
        self._start = _clock.now(), step
        self._stamps.clear()
        self._stamps.append(self._start)

    def _end_early(self, calls):
        """Ends the stretch before the last `calls` calls."""
        if self.behind is False and len(self._stamps) > calls:
            self._end(self._stamps[-calls])
        self._start = None
        self._stamps.clear()

    def _end(self, end):
        (begun, first), self._start = self._start, None
        times = [now for now, step in self._stamps if step < end[1]]
        self._stamps.clear()
        self._steps += end[1] - first
        self._seconds += end[0] - begun
        if self.behind:
            self._durations.clear()
            return
        calls = itertools.pairwise([*times, end[0]])
        self._durations.extend(
            [(b - a) / self.steps_per_call for a, b in calls]
        )


class SpeedLog:
    """Logs step times when the counters are read.

    Args:
        watch: The `Watch`.

    Attributes:
        clock: `StepClock`.
    """

    def __init__(self, watch):
        self._watch = watch
        look = watch.counter_log.look
        self.clock = StepClock(watch.model, watch.budget, look)
        self._thinning = Thinning(_ROWS)
        self._peak_before = active.memory().peak_bytes() or 0

    def write(self, step: int, last: bool = False):
        """Logs the step times since the last row, if a row is due.

        Args:
            step: Int. The number of the next step.
            last: Boolean, whether this is the last row. Defaults to `False`.
        """
        if not self.clock.measured or not (self._thinning.due() or last):
            return
        started, log = _clock.now(), self._watch.log
        row = self._row(step)
        log.rows(step, schema.PERFORMANCE, [row])
        if step >= log.next_step:
            rates = rates_of(row).items()
            curves = {f"{schema.SPEED}/{n}": v for n, v in rates}
            known = {t: v for t, v in curves.items() if v is not None}
            log.scalars(step, known)
        self._watch.budget.add(READINGS, _clock.now() - started)

    def _row(self, step):
        steps, seconds, durations = self.clock.take()
        watch, peak = self._watch, active.memory().peak_bytes() or 0
        # On JAX, a batch holds the samples of all devices. On other backends, a
        # batch holds the samples of one worker.
        is_whole = keras.backend.backend() == "jax"
        workers = active.processes().workers(watch.model)
        samples = watch.ranges.samples * (1 if is_whole else workers)
        return schema.Row(
            step,
            steps,
            seconds,
            steps * samples or math.nan,
            _percentile(durations, 0.5),
            _percentile(durations, 0.95),
            # Omit a peak of the memory use that was reached before this `fit`.
            peak if peak > self._peak_before else math.nan,
            self._saved_in_outputs(),
            watch.budget.share,
            watch.budget.once + watch.budget.before,
        )

    def _saved_in_outputs(self):
        ranges = self._watch.ranges.last
        if ranges is None:
            return math.nan
        measured = [r for r in ranges.readings if "activation" in r.parts]
        narrow = in_16_bits(measured, ranges.dtypes)
        counts = [r.parts["activation"].cumulative[-1] for r in measured]
        total = float(sum(counts))
        return float(narrow @ counts) / (2 * total) if total else math.nan


def _percentile(rising, share):
    if not rising:
        return math.nan
    return rising[min(int(share * len(rising)), len(rising) - 1)]
