"""Logs how fast training is: steps, samples, memory, overhead."""

import math

from keras_mixprec import _clock
from keras_mixprec.backend import active
from keras_mixprec.monitoring.counter_log import ROWS_BY_VARIABLE
from keras_mixprec.monitoring.overhead import READINGS
from keras_mixprec.monitoring.ranges import in_16_bits
from keras_mixprec.monitoring.samples import SampleCount
from keras_mixprec.monitoring.step_clock import StepClock
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.performance import rates_of


class PerformanceLog:
    """Times the steps of a `fit`, and logs that at readings of the counters.

    Args:
        watch: The `Watch`.

    Attributes:
        clock: `StepClock`.
    """

    def __init__(self, watch):
        self._watch = watch
        self._workers = active.processes().workers(watch.model)
        self._samples = SampleCount(watch.model)
        self.clock = StepClock(
            watch.model, watch.budget, self._samples, watch.wait
        )
        self._thinning = Thinning(ROWS_BY_VARIABLE)
        self._peak_before = active.memory().peak_bytes() or 0

    def write(self, step: int, last: bool = False):
        """Logs what was measured since the last call.

        Args:
            step: Int. The number of the next step.
            last: Boolean, whether nothing follows. Defaults to `False`.
        """
        if not self.clock.measured or not (self._thinning.due() or last):
            return
        started = _clock.now()
        self._log(step, self._row(step))
        seconds = _clock.now() - started
        self._watch.budget.add(READINGS, seconds)

    def _log(self, step, row):
        log = self._watch.log
        log.rows(step, schema.PERFORMANCE, [row])
        if step >= log.next_step:
            known = {n: v for n, v in rates_of(row).items() if v is not None}
            log.scalars(
                step, {f"{schema.SPEED}/{n}": v for n, v in known.items()}
            )

    def _row(self, step):
        stretch, durations = self.clock.take()
        budget = self._watch.budget
        return schema.Row(
            step,
            stretch.steps,
            stretch.seconds,
            self._samples_in(stretch),
            _percentile(durations, 0.5),
            _percentile(durations, 0.95),
            self._peak_memory(),
            self._saved_in_outputs(),
            budget.share,
            budget.once + budget.before,
        )

    def _samples_in(self, stretch):
        if self._samples.total:
            every = self._samples.is_of_all_workers
            return stretch.samples * (1 if every else self._workers)
        # TensorFlow's compiled step fetches its own batches.
        count = self._watch.ranges.samples
        return stretch.steps * self._workers * count or math.nan

    def _peak_memory(self):
        """The peak of this process, if it was reached in this `fit`."""
        peak = active.memory().peak_bytes() or 0
        return peak if peak > self._peak_before else math.nan

    def _saved_in_outputs(self):
        ranges = self._watch.range_log.last
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
