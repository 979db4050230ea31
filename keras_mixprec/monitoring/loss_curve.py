"""The loss over the steps of a run, as Keras' own metric has it."""

import math
from collections.abc import Mapping

import keras

from keras_mixprec.backend import active
from keras_mixprec.keras_internals import loss_tracker
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.schema import (
    LOSS,
    LOSS_COLUMNS,
    LOSS_ROWS_PER_CHUNK,
)

# Points of the loss of an interval, after which they are half as often.
_LOSSES = 128


class LossCurve:
    """Logs the mean loss of the steps since it was last logged.

    At readings of the counters, with which it is transferred: two numbers. Of
    an epoch without any reading, as a short run has, Keras tells the mean.
    Batches that the guard of metrics keeps out are in no mean; where it keeps
    out all, or one is not finite, NaN is logged, a gap in the curve. A
    `train_step` of the user's own that does not report its loss to Keras has
    none.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
    """

    def __init__(self, model: keras.Model, log):
        self._model = model
        self._log = log
        self._thinning = Thinning(_LOSSES)
        self._before = 0.0, 0.0
        self._from = 0

    @property
    def variables(self) -> list:
        """The sum of the losses and their weights; none without a loss."""
        tracker = loss_tracker(self._model)
        if not isinstance(tracker, keras.metrics.Mean):
            return []
        return [tracker.total, tracker.count]

    def begin_epoch(self, step: int):
        """Keras has set the variables to 0.

        Args:
            step: Int. How many steps were taken before.
        """
        self._before = 0.0, 0.0
        self._from = step

    def read(self) -> tuple | None:
        """Returns the values of the variables, while they are synchronized."""
        found = [float(active.step().read_sum(v)) for v in self.variables]
        return tuple(found) if found else None

    def write(self, step: int, sums: tuple | None):
        """Logs the mean since the last time, unless it is too early for one.

        Args:
            step: Int. Step of the log.
            sums: What `read` returned.
        """
        if sums is None or not self._thinning.due():
            return
        total, count = sums
        before, counted = self._before
        # As `train_on_batch` may begin again, without an epoch.
        if count < counted or not math.isfinite(before):
            before, counted = 0.0, 0.0
        if step > self._from:
            self._before, self._from = sums, step
            new = count - counted
            loss = (total - before) / new if new else math.nan
            self._log_mean(step, loss)

    def end_epoch(self, step: int, logs: Mapping | None):
        """Logs the mean of an epoch without any reading, which costs nothing.

        Args:
            step: Int. The last step of the epoch.
            logs: Mapping, as `fit` gives it to `on_epoch_end`.
        """
        unread = self._before == (0.0, 0.0) and step > self._from
        loss = (logs or {}).get("loss")
        if unread and loss is not None and self.variables:
            self._from = step
            self._log_mean(step, float(loss))

    def _log_mean(self, step, loss):
        row = [step, loss if math.isfinite(loss) else math.nan]
        size = LOSS_ROWS_PER_CHUNK
        self._log.rows(step, LOSS, [row], LOSS_COLUMNS, size)
