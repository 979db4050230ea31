"""The loss over the steps of a run, as Keras' own metric has it."""

import math
from collections.abc import Mapping

import keras

from keras_mixprec.backend import active
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.schema import LOSS

# Points of the loss of an interval, after which they are half as often.
_LOSSES = 128

_NOTHING = 0.0, 0.0


class LossCurve:
    """Logs the mean loss of the steps since it was last logged.

    It reads the sum and the count of the metric `"loss"` together with the
    optimizer's counters. An epoch without any reading, as in a short run, gets
    the mean that `fit` reports. The guard of metrics keeps bad batches out of
    the sum: an interval without a good batch is logged as NaN, a gap in the
    curve. A `train_step` that keeps its loss elsewhere has a point an epoch, if
    it reports a `"loss"` at all.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.

    Attributes:
        points: List of pairs of a step and the mean loss of the steps before
            it, those that were logged.
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
        """The sums of the losses and their weights; none without a loss."""
        return [
            variable
            for metric in self._model.metrics
            if isinstance(metric, keras.metrics.Mean) and metric.name == "loss"
            for variable in (metric.total, metric.count)
        ]

    def begin_epoch(self, step: int):
        """Keras has set the variables to 0.

        Args:
            step: Int. How many steps were taken before.
        """
        self._before, self._held = _NOTHING, None
        self._from = step

    def hold(self):
        """Keeps the values of the variables until the next epoch begins.

        The validation of an epoch uses the same variables.
        """
        self._held = self.read()

    def read(self) -> tuple | None:
        """Returns the values of the variables, while they are synchronized."""
        if self._held is not None:
            return self._held
        found = [float(active.step().read_sum(v)) for v in self.variables]
        # A model may have a metric "loss" of its own beside that of `compile`.
        pairs = zip(found[::2], found[1::2], strict=True)
        return max(pairs, key=lambda pair: pair[1], default=None)

    def write(self, step: int, sums: tuple | None, nonfinite: int):
        """Logs the mean since the last time, unless it is too early for one.

        Args:
            step: Int. Step of the log.
            sums: Tuple or `None`, from `read`.
            nonfinite: Int. Losses so far that were not finite.
        """
        if sums is None or not self._thinning.due():
            return
        total, count = sums
        before, counted = self._before
        # The sums restart when a loop resets its metrics, even without an
        # epoch.
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
        """Logs the mean of those steps of an epoch that are in no reading.

        Args:
            step: Int. The last step of the epoch.
            logs: Mapping, as `fit` gives it to `on_epoch_end`.
        """
        loss = (logs or {}).get("loss")
        if loss is None or step == self._from:
            return
        before, counted = self._before
        if counted:
            total, count = self.read() or _NOTHING
            if count <= counted:  # No good batch has come since.
                return
            loss = (total - before) / (count - counted)
        self._from = step
        self._log_mean(step, float(loss))

    def _log_mean(self, step, loss):
        self.points.append((step, loss))
        row = [step, loss if math.isfinite(loss) else math.nan]
        self._log.rows(step, LOSS, [row])
