"""When the ranges of layers are read."""

import functools
import itertools
import math
from typing import Any

from keras import tree

from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.monitoring.failures import warn_disabled
from keras_mixprec.monitoring.overhead import PROBES
from keras_mixprec.monitoring.range_reading import (
    accumulation_steps,
    read_ranges,
)
from keras_mixprec.monitoring.samples import count_samples
from keras_mixprec.numerics.arrays import detached


class RangeReader:
    """Reads the ranges of all layers on some of the batches of a run.

    It always reads them after the first step, after the last, and whenever
    eight times as many were taken, so a run that dies leaves recent ranges.
    Between these it reads every so often, and after the loss scale grew or a
    step was skipped, as far as the overhead budget allows. Histograms are
    logged whenever twice as many steps were taken.

    Args:
        watch: The `Watch`.

    Attributes:
        due_at: The step of the next reading, infinite for never.
        samples: Int. Samples in the first batch, `0` before it.
        batch: The last batch that was read without infinities or NaNs. It
            begins with the batch of the first step, and is `None` before.
        withheld: String. Why something was not measured, in one sentence;
            empty if all was.
    """

    def __init__(self, watch):
        self.due_at: float = math.inf
        self.samples = 0
        self.batch: Any = None
        self.withheld = ""
        self._watch = watch
        self._off = _reason_for_none(watch.settings)
        self._needed = 0
        self._steps: list[int] = []
        self._seconds = self._last_seconds = 0.0
        self._last_histograms = 0
        self._failed: Exception | None = None

    def start(self):
        """Holds the first batch."""
        if self._off:
            self._withhold(self._off)
        else:
            self.due_at = self._watch.first_step + 1
        self._watch.on_next_batch(self._hold)

    def hurry(self):
        """Reads as soon as the budget allows: something has changed."""
        self.due_at = math.inf if self._off else 0

    def read(self):
        """Reads ranges on the next batch, if it may."""
        watch = self._watch
        is_extra = watch.taken < self._needed
        if is_extra and watch.budget.left(PROBES) <= self._last_seconds:
            return
        self._needed = 8 * watch.taken
        interval = _interval(watch.settings.probe_every, watch.model)
        needed = watch.first_step + self._needed
        self.due_at = min(watch.step + interval, needed)
        watch.on_next_batch(functools.partial(self._read, is_extra))

    def finish(self):
        """Reads once more if steps were taken since."""
        if not self._off:
            self._finish()
        # Report the failure only now. If a training step raises the same error,
        # it is diagnosed instead.
        if self._failed is not None:
            self._withhold(_reason(self._failed))
            warn_disabled("measure layers beside training", self._failed)

    def _finish(self):
        watch, step = self._watch, self._watch.step
        if step == watch.first_step:
            self._withhold("no step was taken.")
        elif self.batch is None:
            self._withhold("there is no batch to measure on.")
        elif step not in self._steps:
            self._last_histograms = 0
            self._read(False, self.batch)
        if self._steps:
            event = {"steps": self._steps, "seconds": round(self._seconds, 3)}
            watch.log.event(step, {"kind": "ranges_measured"} | event)

    def take_batch(self) -> Any:
        """Returns `batch`, and lets go of it."""
        batch, self.batch = self.batch, None
        return batch

    def _hold(self, batch):
        self.samples = count_samples(batch)
        if not self._off:
            self.batch = tree.map_structure(detached, batch)

    def _read(self, is_extra, batch):
        """Reads ranges on a batch, `None` if only other workers have one."""
        watch = self._watch
        if batch is None or not watch.log.writes:  # Which another worker has.
            return
        started = watch.budget.now()
        try:
            ranges = read_ranges(watch.model, batch)
            histograms = watch.taken >= 2 * self._last_histograms
            watch.range_log.write(ranges, watch.step, histograms)
        # An error in a measurement must not end training.
        except Exception as error:
            # After one failure the model may have been repaired.
            if self._failed is not None:
                self._off, self.due_at = _reason(error), math.inf
                self.batch = None
                self._withhold(self._off)
            self._failed = error
        else:
            self._failed = None
            self._steps.append(watch.step)
            # The last reading shall not be one of bad data.
            if ranges.is_finite:
                self.batch = tree.map_structure(detached, batch)
            if histograms:
                self._last_histograms = watch.taken
        self._last_seconds = watch.budget.now() - started
        self._seconds += self._last_seconds
        watch.budget.add(PROBES, self._last_seconds, is_extra)

    def _withhold(self, reason):
        step = self._watch.step
        if not self.withheld:
            self.withheld = (
                f"Ranges of layers withheld at step {step}: {reason}"
            )
            event = {"kind": "ranges_withheld", "message": self.withheld}
            self._watch.log.event(step, event)


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

    If gradients are accumulated over several steps, only the last of them
    updates. Readings meet each of them in turn.
    """
    optimizers = optimizers_of(model).values()
    windows = math.prod(map(accumulation_steps, optimizers))
    steps = itertools.count(every)
    return next(n for n in steps if math.gcd(n, windows) == 1)
