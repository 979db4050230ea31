"""Which batches a metric has seen since it was reset: none, bad ones, any."""

from keras import ops

from keras_mixprec.callbacks.lent_variables import LentVariables
from keras_mixprec.callbacks.nonfinite_losses import NonfiniteLosses

# What replicas have seen is added up, so that bad batches of up to 1,000 of
# them make no good one.
_NOTHING, _ONLY_BAD, _SOME_GOOD = 0.0, 2.0**-10, 1.0


class SeenBatches:
    """Keeps whether a metric has seen good batches, or bad ones only.

    Args:
        variables: `LentVariables`, where it is kept.
        metric: A `keras.metrics.Metric`.
    """

    def __init__(self, variables: LentVariables, metric):
        self._seen = variables.add(metric, "seen_by_guard")

    def add(self, finite):
        """Takes note of a batch.

        Args:
            finite: Boolean, or a boolean tensor. Whether it was a good one.
        """
        if finite is True:
            self._seen.assign(_SOME_GOOD)
            return
        bad = ops.maximum(self._seen.value, _ONLY_BAD)
        self._seen.assign(ops.where(finite, _SOME_GOOD, bad))

    def reset(self):
        """Forgets all batches."""
        self._seen.assign(_NOTHING)

    def none_good_here(self):
        """Whether this replica has seen bad batches only."""
        return ops.equal(self._seen, _ONLY_BAD)

    def only_bad(self):
        """Whether all batches were bad, if there were any."""
        seen_any = ops.greater(self._seen, _NOTHING)
        return ops.logical_and(seen_any, ops.less(self._seen, _SOME_GOOD))


class AveragedLosses:
    """The same of the metric that averages the losses, without a variable.

    Args:
        losses: `NonfiniteLosses`, which count its bad batches.
    """

    def __init__(self, losses: NonfiniteLosses):
        self._losses = losses
        self.reset = losses.count_from_here

    def none_good_here(self):
        """Whether this replica has averaged nothing."""
        return ops.equal(self._losses.tracker.count, 0)

    def only_bad(self):
        """Whether there were losses, but none finite."""
        return ops.logical_and(self.none_good_here(), self._losses.any())
