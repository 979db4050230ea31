"""How fast training is, and what monitoring may cost."""

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

# Rows of the table of speed in an interval, after which every second one is
# written.
_ROWS = 128

# Steps of the first stretch, so that short runs have the time of a step.
_FIRST = 4

# The durations of this many calls are kept, the latest.
_MOST_CALLS = 4096

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

    It thins only work that repeats: readings of the counters without news, and
    extra readings of ranges. It decides on no finding, so a busy machine finds
    as much. Diagnoses are due after a number of steps, see `audit_schedule.py`
    and `tuning/trigger.py`, and counters are read whenever there is news, see
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
        special: Int. How often there was work other than reading counters.
            Steps beside it take longer than others.
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
        wait: Function that waits for all steps so far.

    Attributes:
        behind: Boolean, whether the device was behind the host by more than a
            step at the end of the last stretch that the host waited for;
            `None` before.
        steps_per_call: Int.
    """

    def __init__(self, model, budget, wait):
        self.behind: bool | None = None
        self._model = model
        self._budget = budget
        self._wait = wait
        self.steps_per_call = getattr(model, "steps_per_execution", 1)
        self._stamps = deque(maxlen=_MOST_CALLS)
        # A stamp is the time when a call begins, and the number of its step.
        self._start: tuple[float, int] | None = None
        self._kind: tuple | None = None
        self._compiles = True
        self._steps, self._seconds = 0, 0.0
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
            self._stamps.append((_clock.now(), step))
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
        begun, last = self._stamps[-1]
        steps = step - start[1]
        self.behind = seconds * steps > begun + seconds - start[0]
        at_stamp = begun + seconds, last
        self._end((_clock.now(), step) if self.behind else at_stamp)

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
        return self._steps > 0 and self._seconds > 0

    def take(self) -> tuple[int, float, list[float]]:
        """Returns the measurements since the last call.

        Returns:
            The number of steps, their time in seconds, and the times of the
            latest steps in rising order. The list is empty if the host only
            enqueued them.
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
    """Logs the time of steps at readings of the counters.

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
        """Logs what was measured since the last call.

        Args:
            step: Int. The number of the next step.
            last: Boolean, whether nothing follows. Defaults to `False`.
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
        # JAX's batch is an array on all devices.
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
            # The peak of an earlier `fit` says nothing of this one.
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
