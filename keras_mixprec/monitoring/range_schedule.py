"""Ranges of every layer from the first steps of a run and from its last."""

import math

from keras import tree

from keras_mixprec.formats import format_count
from keras_mixprec.monitoring.failures import warn_disabled
from keras_mixprec.monitoring.overhead import PROBES
from keras_mixprec.monitoring.samples import count_samples
from keras_mixprec.numerics.arrays import detached
from keras_mixprec.numerics.range_reading import read_ranges, read_weights

# What the readings between the first and the last may take together, a share of
# the run so far; more with a larger `max_overhead`. They are no part of the
# overhead.
_SHARE = 0.05

# What the sentence on what was withheld begins with.
_RANGES = "Ranges of layers "


class RangeReader:
    """Measures all layers on the first batch of a run, outside of its steps.

    After the first step, after the last and whenever eight times as many were
    taken, whatever that takes, and after twice as many as far as a share of the
    time allows, unless steps are probed. So a run that dies leaves ranges that
    are not old. Probed steps count no exponents: histograms are measured beside
    them, after the first epoch until which twice as many steps were taken.

    Args:
        log: The `RunLog`.
        settings: `Settings` of the session.
        prober: `Prober`, which writes what is measured.
        budget: `OverheadBudget`.

    Attributes:
        batch: The first batch of the run, `None` before it.
        samples: Int. Samples in that batch, `0` before it.
        withheld: String. Why something was not measured, in one sentence;
            empty if all was.
    """

    def __init__(self, log, settings, prober, budget):
        self.withheld = ""
        self._log = log
        self._share = max(settings.max_overhead, _SHARE)
        self._limited = settings.max_overhead < 1
        self._off = _reason_for_none(settings)
        self._prober = prober
        self._budget = budget
        self._started = budget.now()
        self._first_step = self._next = 0
        self._lacks_histograms = False
        self._seconds = self._between = self._last = 0.0
        self._steps = []
        self.batch = None
        self.samples = 0

    @property
    def due_at(self) -> float:
        """The step from which on a reading is due, infinite for never."""
        return math.inf if self._off else self._next

    def start(self, model, step: int, examiner):
        """Holds the first batch, to be measured on.

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

    def read(self, model, step: int):
        """Measures what is due before the next step, if it may.

        Args:
            model: Function that returns the `keras.Model` with variables that
                are synchronized.
            step: Int. The number of the next batch.
        """
        steps = step - self._first_step
        self._next = self._first_step + 2 * steps
        # Probes of steps make up for it, but for histograms.
        probed = self._prober.last_step - self._first_step > steps // 2
        if probed and not self._lacks_histograms:
            return
        self._lacks_histograms = False
        last = self._steps[-1] - self._first_step if self._steps else 0
        if steps >= 8 * last:
            self._read(model(), step, probed)
        elif self._affords_another():
            self._read(model(), step, probed)
            self._between += self._last

    def end_epoch(self, step: int):
        """An epoch is over: histograms may be due before the next step.

        Args:
            step: Int. How many steps were taken.
        """
        if self._steps:
            last, now = (s - self._first_step for s in (self._steps[-1], step))
            self._lacks_histograms = now >= 2 * last
        if self._lacks_histograms:
            self._next = step

    def finish(self, model, step: int):
        """Measures once more if steps were taken since, and says what it took.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
            step: Int. How many steps were taken.
        """
        if self._off:
            return
        self.end_epoch(step)
        if step == self._first_step:
            self._withhold(step, "no step was taken.")
        elif step not in self._steps:
            probed = self._prober.last_step >= step
            self._read(model, step, probed)
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
        self.batch = None
        if not self._off:
            self.batch = tree.map_structure(detached, batch)

    def _affords_another(self):
        """Whether one between the first and the last is within its share."""
        elapsed = self._budget.now() - self._started - self._seconds
        expected = self._between + self._last
        return not self._limited or expected <= self._share * elapsed

    def _read(self, model, step, probed=False):
        """Writes ranges and histograms, where steps are probed these only."""
        if not self._log.writes:  # Another worker does.
            return
        started = self._budget.now()
        ranges = self._ranges(model, step)
        try:
            if not probed:
                self._prober.write(ranges or read_weights(model), step)
            elif ranges:
                self._prober.write_histograms(ranges.readings, step)
        except Exception as error:
            self._give_up(step, error)
        self._last = self._budget.now() - started
        if ranges:
            self._steps.append(step)
        self._seconds += self._last
        self._budget.add(PROBES, self._last, is_overhead=False)

    def _ranges(self, model, step):
        """The ranges of all layers, `None` if there are none to be had."""
        if self.batch is None:
            self._withhold(step, "there is no batch to measure on.")
            return None
        try:
            return read_ranges(model, self.batch)
        # Whatever it runs into, training continues.
        except Exception as error:
            self._give_up(step, error)
        return None

    def _give_up(self, step, error):
        self.batch = None
        self._withhold(step, f"{type(error).__name__}: {str(error)[:200]}")
        warn_disabled("measure layers beside training", error)

    def _withhold(self, step, reason):
        if self.withheld:
            return
        self.withheld = f"{_RANGES}withheld at step {step}: {reason}"
        event = {"kind": "ranges_withheld", "message": self.withheld}
        self._log.event(step, event)


def _reason_for_none(settings):
    if not settings.probe_every:
        return "`probe_every=0`. With the default of 100 they are measured."
    if not settings.max_overhead:
        return "`max_overhead=0`. With the default of 0.02 they are measured."
    return None
