"""Reads and logs the ranges of layers when due."""

import functools
import itertools
import math
from collections import defaultdict
from typing import Any

from keras import tree

from keras_mixprec._console import print_message
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.metrics import PROBED
from keras_mixprec.monitoring import ranges
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.monitoring.forecasts import Trend
from keras_mixprec.monitoring.speed import PROBES
from keras_mixprec.numerics.arrays import detached
from keras_mixprec.numerics.range_reading import (
    Ranges,
    accumulation_steps,
    read_ranges,
)
from keras_mixprec.reporting.schema import EXPONENTS, RANGES

# If the overhead budget does not allow a reading of ranges, try again this many
# times per interval. Each try takes 20 us, which is 1% of a small model's step
# on JAX.
_RETRIES = 8

_ACTIVATION = [*PROBED].index("activation_headroom_bits")


class RangeLog:
    """Reads and logs the ranges of all layers on some batches.

    Ranges are always read after the first step, after the last step, and
    whenever the step count has grown by a factor of 8. A run that crashes
    therefore leaves recent ranges. Further readings follow every `probe_every`
    steps, after the loss scale grew and after a skipped step, if the overhead
    budget allows them. Histograms are logged whenever the step count has
    doubled.

    Args:
        watch: The `Watch`.

    Attributes:
        due_at: The step of the next reading, infinity for never.
        samples: Int. The number of samples in the first batch, `0` before.
        batch: The last batch whose reading was finite, or the batch of the
            first step if no reading was finite yet. `None` before the first
            step.
        last: The last `Ranges`, or `None`.
        zeros: `ZeroGradients` of the readings.
    """

    def __init__(self, watch):
        self.due_at: float = math.inf
        self.samples = 0
        self.batch: Any = None
        self.last: Ranges | None = None
        self.zeros = ranges.ZeroGradients()
        self._watch, self._log = watch, watch.log
        self._off = _reason_for_none(watch.settings)
        self._needed = 0
        self._steps: list[int] = []
        self._seconds = self._cost = 0.0
        self._last_histograms = 0
        self._failed: Exception | None = None
        self._is_withheld = False
        self._reported = set()
        self._trends = defaultdict(Trend)

    def start(self):
        """Plans the first reading, and keeps the first batch."""
        if self._off:
            self._withhold(self._off)
        else:
            self.due_at = self._watch.first_step + 1
        self._watch.on_next_batch(self._hold)

    def hurry(self):
        """Plans a reading as soon as the budget allows one."""
        self.due_at = math.inf if self._off else 0

    def read(self):
        """Reads ranges on the next batch, if the budget allows it."""
        watch = self._watch
        is_extra = watch.taken < self._needed
        if is_extra and watch.budget.left(PROBES) <= self._cost:
            every = watch.settings.update_freq, watch.settings.probe_every
            self.due_at = watch.step + max(min(every) // _RETRIES, 1)
            return
        self._needed = 8 * watch.taken
        interval = _interval(watch.settings.probe_every, watch.model)
        needed = watch.first_step + self._needed
        self.due_at = min(watch.step + interval, needed)
        watch.on_next_batch(functools.partial(self._read, is_extra))

    def finish(self):
        """Reads ranges once more if steps were taken since the last reading."""
        if not self._off:
            self._finish()
        # Report a failed reading of ranges only when `fit` ends. If a training
        # step raises the same error, the step is diagnosed instead.
        if self._failed is not None:
            self._withhold(_reason(self._failed))
            warn_disabled("measure layers beside training", self._failed)

    def _finish(self):
        watch, step = self._watch, self._watch.step
        if step == watch.first_step:
            self._withhold("no step was taken.")
        elif self.batch is None:
            self._withhold("there is no batch to measure.")
        elif step not in self._steps:
            self._last_histograms = 0
            self._read(False, self.batch)
        if self._steps:
            event = {"steps": self._steps, "seconds": round(self._seconds, 3)}
            self._log.event(step, {"kind": "ranges_measured"} | event)

    def _hold(self, batch):
        self.samples = _count_samples(batch)
        if not self._off:
            self.batch = tree.map_structure(detached, batch)

    def _read(self, is_extra, batch):
        """Reads ranges on a batch, `None` if only other workers have one."""
        watch = self._watch
        if batch is None or not self._log.writes:
            return
        started = watch.budget.now()
        try:
            measured = read_ranges(watch.model, batch)
            self._write(measured)
        # An error while ranges are measured must not end training.
        except Exception as error:
            # Stop reading ranges at the second failure in a row. After the
            # first failure, the tuner may have repaired the model.
            if self._failed is not None:
                self._off, self.due_at = _reason(error), math.inf
                self.batch = None
                self._withhold(self._off)
            self._failed = error
        else:
            self._failed = None
            self._steps.append(watch.step)
            # The last reading of ranges in a run uses the stored batch, so do
            # not store a batch with bad data.
            if measured.is_finite:
                self.batch = tree.map_structure(detached, batch)
        self._cost = watch.budget.now() - started
        self._seconds += self._cost
        watch.budget.add(PROBES, self._cost, is_extra)

    def _withhold(self, reason):
        step = self._watch.step
        if not self._is_withheld:
            self._is_withheld = True
            message = f"Layer ranges are missing at step {step}: {reason}"
            event = {"kind": "ranges_withheld", "message": message}
            self._log.event(step, event)

    def _write(self, measured):
        self.last, step = measured, self._watch.step
        readings = measured.readings
        table = ranges.metrics_table(readings, measured.limits)
        paths = [reading.path for reading in readings]
        self._log.heat(step, table, paths, PROBED)
        narrow = ranges.in_16_bits(readings, measured.dtypes)
        self.zeros.add(step, paths, table, narrow)
        curves = ranges.curves(table, narrow)
        self._log.scalars(step, {f"{RANGES}/{n}": v for n, v in curves.items()})
        for path, row, is_narrow in zip(paths, table, narrow, strict=True):
            if is_narrow:
                self._log_trend(path, float(row[_ACTIVATION]), step)
        if self._watch.taken >= 2 * self._last_histograms:
            self._last_histograms = self._watch.taken
            self._write_histograms(readings, step)
        for path, reason in measured.failures.items():
            if path not in self._reported:
                self._reported.add(path)
                event = failure_event("probe_failed", reason, layer=path)
                self._log.event(step, event)
                warn_disabled(f"measure {path!r}", reason)

    def _write_histograms(self, readings, step):
        found = [
            (part, reading.path, bins)
            for reading in readings
            for part in EXPONENTS
            if part in reading.parts and len(bins := reading.parts[part].bins())
        ]
        if found:
            self._log.histograms(step, found)

    def _log_trend(self, path, bits, step):
        left = self._trends[path].add(step, bits)
        if left is None or path in self._reported:
            return
        self._reported.add(path)
        event = {
            "kind": "trend",
            "layer": path,
            "headroom_bits": round(bits, 2),
            "overflows_in_steps": round(left),
        }
        self._log.event(step, event)
        if self._watch.settings.verbose:
            print_message(
                f"The activations of {path!r} have {bits:.1f} bits of headroom "
                f"left in {self.last.limits.name}. If they keep growing at "
                f"this rate, they overflow in about {left:.0f} steps."
            )


def _reason(error):
    return f"{type(error).__name__}: {str(error)[:200]}"


def _reason_for_none(settings):
    if not settings.probe_every:
        return "`probe_every=0` turns them off. The default is 100."
    if not settings.max_overhead:
        return "`max_overhead=0` turns them off. The default is 0.02."
    return None


def _interval(every, model):
    """Returns the steps between two readings, at least `every`.

    With gradient accumulation, only one step of several updates weights. The
    interval lets readings meet each of these steps in turn.
    """
    optimizers = optimizers_of(model).values()
    windows = math.prod(map(accumulation_steps, optimizers))
    steps = itertools.count(every)
    return next(n for n in steps if math.gcd(n, windows) == 1)


def _count_samples(batch):
    """Returns the number of samples in a batch, 0 if it is not known.

    Inputs with equal numbers of rows have one row per sample. If the numbers
    differ, the rows of the targets count: a graph network, for example, has
    inputs with a row for each node and each edge.
    """
    for part in batch if isinstance(batch, (list, tuple)) else (batch,):
        shapes = (getattr(x, "shape", ()) for x in tree.flatten(part))
        rows = {shape[0] for shape in shapes if len(shape)}
        if len(rows) == 1:
            return rows.pop()
    return 0
