"""Logs the loss of a run from Keras' own loss metric."""

import math
from collections.abc import Mapping

import keras

from keras_mixprec.backend import active
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.schema import LOSS

# After this many points on the loss curve, the loss is logged half as often.
_LOSSES = 128

_NOTHING = 0.0, 0.0


class LossCurve:
    """Logs the mean loss of the steps since the last point.

    The sum and the count of the metric `"loss"` are read together with the
    optimizer's counters. An epoch without any reading, as in a short run, gets
    the mean that `fit` reports. The metric guard keeps failed batches out of
    the sum. An interval without a good batch is logged as NaN, which leaves a
    gap in the curve. A `train_step` without this metric gets one point per
    epoch, if it reports a `"loss"`.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.

    Attributes:
        points: List of the logged pairs: a step, and the mean loss since the
            previous point.
    """

    def __init__(self, model: keras.Model, log):
        self.points: list[tuple[int, float]] = []
        self._model = model
        self._log = log
        self._thinning = Thinning(_LOSSES)
        self._before = _NOTHING
        self._held: tuple | None = None
        self._from = self._nonfinite = 0

    @property
    def variables(self) -> list:
        """The variables with the sum of losses and the sum of weights."""
        return [
            variable
            for metric in self._model.metrics
            if isinstance(metric, keras.metrics.Mean) and metric.name == "loss"
            for variable in (metric.total, metric.count)
        ]

    def begin_epoch(self, step: int):
        """Starts an epoch, for which Keras has reset the variables to 0.

        Args:
            step: Int. The number of steps taken before the epoch.
        """
        self._before, self._held = _NOTHING, None
        self._from = step

    def hold(self):
        """Keeps the values of the variables until the next epoch begins.

        The validation of an epoch uses the same variables.
        """
        self._held = self.read()

    def read(self) -> tuple | None:
        """Returns the values of the variables, which must be synchronized."""
        if self._held is not None:
            return self._held
        found = [float(active.step().read_sum(v)) for v in self.variables]
        # A model may have its own metric "loss" in addition to Keras' loss
        # metric. Read the metric that has seen data.
        pairs = zip(found[::2], found[1::2], strict=True)
        return max(pairs, key=lambda pair: pair[1], default=None)

    def write(self, step: int, sums: tuple | None, nonfinite: int):
        """Logs the mean loss since the last point, if a point is due.

        Args:
            step: Int. Step of the log.
            sums: Tuple or `None`, from `read`.
            nonfinite: Int. The number of non-finite losses so far.
        """
        if sums is None or not self._thinning.due():
            return
        total, count = sums
        before, counted = self._before
        # If a custom loop resets its metrics within an epoch, the sums of
        # losses start again from 0.
        if count < counted or not math.isfinite(before):
            before, counted = _NOTHING
        if step > self._from:
            self._before, self._from = sums, step
            if count > counted:
                self._log_mean(step, (total - before) / (count - counted))
            elif nonfinite > self._nonfinite:
                self._log_mean(step, math.nan)
            self._nonfinite = nonfinite

    def end_epoch(self, step: int, logs: Mapping | None):
        """Logs the mean loss of the steps since the last reading.

        Args:
            step: Int. The last step of the epoch.
            logs: Mapping, as `fit` passes it to `on_epoch_end`.
        """
        loss = (logs or {}).get("loss")
        if loss is None or step == self._from:
            return
        before, counted = self._before
        if counted:
            total, count = self.read() or _NOTHING
            if count <= counted:  # All batches since the last reading failed.
                return
            loss = (total - before) / (count - counted)
        self._from = step
        self._log_mean(step, float(loss))

    def _log_mean(self, step, loss):
        self.points.append((step, loss))
        row = [step, loss if math.isfinite(loss) else math.nan]
        self._log.rows(step, LOSS, [row])
