"""When the ranges of layers are read."""

import functools
import itertools
import math

from keras import tree

from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import format_count
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.monitoring.failures import warn_disabled
from keras_mixprec.monitoring.overhead import PROBES
from keras_mixprec.monitoring.range_reading import (
    accumulation_steps,
    read_ranges,
)
from keras_mixprec.monitoring.samples import count_samples
from keras_mixprec.numerics.arrays import detached

# What the sentence on what was withheld begins with.
_RANGES = "Ranges of layers "


class RangeReader:
    """Reads the ranges of all layers on some of the batches of a run.

    After the first step, after the last and whenever eight times as many were
    taken, whatever that takes: so a run that dies leaves ranges that are not
    old. In between every so often, and after the loss scale grew or a step was
    skipped, as far as the overhead budget allows. Histograms are logged
    whenever twice as many steps were taken.

    Args:
        log: The `RunLog`.
        settings: `Settings` of the session.
        range_log: `RangeLog`, which writes what is read.
        budget: `OverheadBudget`.

    Attributes:
        batch: The last batch that was read without infinities or NaNs, at
            first that of the first step; `None` before it.
        samples: Int. Samples in the first batch, `0` before it.
        withheld: String. Why something was not measured, in one sentence;
            empty if all was.
    """

    def __init__(self, log, settings, range_log, budget):
        self.batch = None
        self.samples = 0
        self.withheld = ""
        self._log = log
        self._every = settings.probe_every
        self._off = _reason_for_none(settings)
        self._range_log = range_log
        self._budget = budget
        self._first_step = 0
        self._next = math.inf
        self._needed = 0
        self._steps = []
        self._seconds = self._last_seconds = 0.0
        self._last_histograms = 0
        self._waiting = None
        self._failed: Exception | None = None

    @property
    def due_at(self) -> float:
        """The step from which on a reading is due, infinite for never."""
        return math.inf if self._off else self._next

    def start(self, model, step: int, examiner):
        """Holds the first batch.

        Args:
            model: The `keras.Model`.
            step: Int. The number of the first batch.
            examiner: `Examiner`, which hands over batches.
        """
        self._first_step, self._next = step, step + 1
        if self._off:
            self._withhold(step, self._off)
        # The examiner itself goes by the first batch.
        examiner.on_next_batch(model, step, self._hold)

    def hurry(self):
        """Reads as soon as the budget allows: something has changed."""
        self._next = 0

    def read(self, model, step: int):
        """Reads ranges on the next batch, if it may.

        Args:
            model: The `keras.Model`.
            step: Int. The number of that batch.
        """
        steps = step - self._first_step
        is_extra = steps < self._needed
        if is_extra and self._budget.left(PROBES) <= self._last_seconds:
            return
        self._needed = 8 * steps
        interval = _interval(self._every, model)
        self._next = min(step + interval, self._first_step + self._needed)
        self._waiting = functools.partial(self._read, model, step, is_extra)
        TrainFunction.of(model).before_next(self._waiting)

    def finish(self, model, step: int):
        """Reads once more if steps were taken since.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
            step: Int. How many steps were taken.
        """
        TrainFunction.of(model).cancel(self._waiting)
        if not self._off:
            self._finish(model, step)
        # Not before: a step may raise the same, and be diagnosed for it.
        if self._failed is not None:
            self._withhold(step, _reason(self._failed))
            warn_disabled("measure layers beside training", self._failed)

    def _finish(self, model, step):
        if step == self._first_step:
            self._withhold(step, "no step was taken.")
        elif self.batch is None:
            self._withhold(step, "there is no batch to measure on.")
        elif step not in self._steps:
            self._last_histograms = 0
            self._read(model, step, False, self.batch)
        if self._steps:
            event = {"steps": self._steps, "seconds": round(self._seconds, 3)}
            self._log.event(step, {"kind": "ranges_measured"} | event)

    def __str__(self):
        """What was measured at what cost, and what was not."""
        if not self._steps:
            return self.withheld
        measured = (
            f"Ranges of all layers measured "
            f"{format_count(len(self._steps), 'time')} beside training, in "
            f"{self._seconds:.1f} s"
        )
        if not self.withheld:
            return f"{measured}."
        return f"{measured}, and {self.withheld.removeprefix(_RANGES)}"

    def _hold(self, batch):
        self.samples = count_samples(batch)
        if not self._off:
            self.batch = tree.map_structure(detached, batch)

    def _read(self, model, step, is_extra, batch):
        """Reads ranges on a batch, `None` if only other workers have one."""
        if batch is None or not self._log.writes:  # Which another worker has.
            return
        started = self._budget.now()
        try:
            ranges = read_ranges(model, batch)
            steps = step - self._first_step
            histograms = steps >= 2 * self._last_histograms
            self._range_log.write(ranges, step, histograms)
        # Whatever it runs into, training continues.
        except Exception as error:
            if self._failed is not None:  # What failed once may be repaired.
                self._off, self.batch = _reason(error), None
                self._withhold(step, self._off)
            self._failed = error
        else:
            self._failed = None
            self._steps.append(step)
            # What is read at the end shall not be that of bad data.
            if ranges.is_finite:
                self.batch = tree.map_structure(detached, batch)
            self._last_histograms = (
                steps if histograms else self._last_histograms
            )
        self._last_seconds = self._budget.now() - started
        self._seconds += self._last_seconds
        self._budget.add(PROBES, self._last_seconds, is_extra)

    def _withhold(self, step, reason):
        if self.withheld:
            return
        self.withheld = f"{_RANGES}withheld at step {step}: {reason}"
        event = {"kind": "ranges_withheld", "message": self.withheld}
        self._log.event(step, event)


def _reason(error):
    return f"{type(error).__name__}: {str(error)[:200]}"


def _reason_for_none(settings):
    if not settings.probe_every:
        return "`probe_every=0`. With the default of 100 they are measured."
    if not settings.max_overhead:
        return "`max_overhead=0`. With the default of 0.02 they are measured."
    return None


def _interval(every, model):
    """Steps from one reading to the next, at least `every`.

    Of steps whose gradients are accumulated, only the last one updates:
    readings meet each of them in turn.
    """
    optimizers = optimizers_of(model).values()
    windows = math.prod(map(accumulation_steps, optimizers))
    steps = itertools.count(every)
    return next(n for n in steps if math.gcd(n, windows) == 1)
