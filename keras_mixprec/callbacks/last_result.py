"""What a metric reported of the epoch before."""

from keras import ops

from keras_mixprec.callbacks.lent_variables import LentVariables


class LastResult:
    """Keeps what a metric reported last, NaN before.

    Args:
        variables: `LentVariables`, where it is kept.
        metric: A `keras.metrics.Metric`.
    """

    def __init__(self, variables: LentVariables, metric):
        self._metric = metric
        self._batches = 0
        # A sum and a count: 0 / 0 is NaN, and each replica has its share.
        self._kept = variables.add(metric, "last_result", (2,))

    def keep(self, batches: int):
        """Keeps the result of now, if there was training in between.

        Args:
            batches: Int. How many batches the model has trained on.
        """
        if batches == self._batches:
            return  # What a validation has left.
        self._batches = batches
        value = self._metric.result()
        if ops.is_tensor(value) and value.shape == ():
            value = ops.cast(value, self._kept.dtype)
            self._kept.assign(ops.stack([value, ops.ones_like(value)]))

    def value(self):
        """Returns what is kept, a scalar tensor."""
        return ops.divide(self._kept[0], self._kept[1])
