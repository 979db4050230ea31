"""The loss of a run by step, from the running mean that Keras keeps."""

import math

import keras

from keras_mixprec.backend import active
from keras_mixprec.keras_internals import loss_tracker
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.schema import (
    LOSS,
    LOSS_COLUMNS,
    LOSS_ROWS_PER_CHUNK,
)

# Points of an interval, after which they are written half as often.
_ROWS = 128


class LossCurve:
    """Logs the mean loss of the steps since it was last logged.

    At readings of the counters, with which it is transferred: two numbers.
    Batches that the guard of metrics keeps out are in no mean; where one is
    not finite, NaN is logged, which the curve leaves out. A `train_step` of
    the user's own that does not report its loss to Keras has none.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
    """

    def __init__(self, model: keras.Model, log):
        self._model = model
        self._log = log
        self._thinning = Thinning(_ROWS)
        self._before = 0.0, 0.0

    @property
    def variables(self) -> list:
        """The sum of the losses and their weights; none without a loss."""
        tracker = loss_tracker(self._model)
        if not isinstance(tracker, keras.metrics.Mean):
            return []
        return [tracker.total, tracker.count]

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
        # An epoch begins at 0.
        if count < counted or not math.isfinite(before):
            before, counted = 0.0, 0.0
        if count > counted:
            self._before = sums
            loss = (total - before) / (count - counted)
            row = [step, loss if math.isfinite(loss) else math.nan]
            size = LOSS_ROWS_PER_CHUNK
            self._log.rows(step, LOSS, [row], LOSS_COLUMNS, size)
