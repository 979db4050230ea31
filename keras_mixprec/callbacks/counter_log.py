"""Reading the counters of a run and logging what is new."""

import contextlib
import time
from collections import defaultdict

from keras_mixprec.callbacks.early_stop import reason_to_stop
from keras_mixprec.callbacks.skips import Skips
from keras_mixprec.callbacks.spending import LOOKS
from keras_mixprec.callbacks.unscaled import UnscaledLoss
from keras_mixprec.reporting.thinning import Thinning

# Curves of every variable are most of a log: 400 of them, read 20,000 times
# in a million steps, are 40 MB at this many points an interval.
ROWS_BY_VARIABLE = 128


class CounterLog:
    """Reads the counters from time to time and logs what is new.

    Args:
        engine: The `Engine`, with its counters.

    Attributes:
        step: Int. The step of the last reading, `None` before the first.
        in_a_row: Int. Steps skipped since the last one applied.
        collapsed: Boolean. Whether steps are skipped and no loss scale can
            fall any further.
        reason_to_stop: String. Why training cannot go on, `None` if it can.
    """

    def __init__(self, engine):
        self._engine = engine
        self._counters, self._log = engine.counters, engine.log
        self._by_variable = Thinning(ROWS_BY_VARIABLE)
        self._skips = Skips(engine.log)
        self._unscaled = UnscaledLoss(engine.model, engine.log)
        self.step = None
        self._forget()

    def read(self, step: int):
        """Reads the counters, if they were not read at this step yet.

        Args:
            step: Int. Step of the log.
        """
        if step == self.step:
            return
        self.step = step
        engine = self._engine
        with self.newest():
            used = self._counters.used()
            readings = {name: w.read(step) for name, w in used.items()}
            counted = self._counters.nonfinite_curves()
        # Before it is logged: a scale that is put back is that of this step.
        readings = engine.bad_data.settle(engine, readings)
        self._unscaled.read(step, used, step > engine.first_step)
        started = time.perf_counter()
        self._write(readings, counted)
        engine.spending.add(LOOKS, time.perf_counter() - started)
        engine.bad_data.tell(engine)

    @contextlib.contextmanager
    def newest(self):
        """Context in which counters are those of the last step."""
        started = time.perf_counter()
        with self._counters.newest() as waited:
            yield
        seconds = time.perf_counter() - started
        self._engine.spending.add(LOOKS, seconds - waited)

    def close(self):
        """Logs what waits and what was counted in all."""
        if self.collapsed:
            self._engine.examiner.tell_rest(self.step)
        self._skips.tell_rest(self.step)
        for event in self._counters.nonfinite_events():
            self._log.event(self.step, event)

    def _forget(self):
        self.in_a_row, self.collapsed, self.reason_to_stop = 0, False, None

    def _write(self, readings, counted):
        curves, by_variable = defaultdict(dict), self._by_variable.due()
        self._forget()
        for name, reading in readings.items():
            self._judge(reading)
            for step, values in reading.curves(name, by_variable).items():
                curves[step] |= values
            self._skips.tell(name, reading)
        curves[self.step] |= counted
        for step in sorted(curves):
            # An earlier `fit` may have ended where this one begins.
            if step >= self._log.next_step:
                self._log.scalars(step, curves[step])

    def _judge(self, reading):
        engine = self._engine
        self.in_a_row = max(self.in_a_row, reading.in_a_row)
        if reading.new_steps or reading.grown:
            engine.prober.hurry()
        if reading.collapsed:
            self.collapsed = True
            engine.examiner.tell_collapse(
                reading.loss_scale, reading.in_a_row, self.step
            )
        self.reason_to_stop = self.reason_to_stop or reason_to_stop(
            reading, engine.examiner.verdicts, engine.settings.stop_after
        )
