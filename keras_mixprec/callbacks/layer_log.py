"""Logging which dtype each layer computes in, whenever that changes."""

from keras_mixprec.policies import PrecisionPlan, precision_summary


class LayerLog:
    """Logs the table of a model's layers at the start and on each change.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
    """

    def __init__(self, model, log):
        self._model = model
        self._log = log
        self._plan = self._last_step = None

    def write(self, step: int) -> dict | None:
        """Logs the table if the dtypes are others than they were.

        Args:
            step: Int. The number of the next batch.

        Returns:
            Dict from paths to compute dtypes, `None` if nothing has changed.
        """
        plan = PrecisionPlan.from_model(self._model)
        if plan == self._plan:
            return None
        table = precision_summary(self._model).to_list()
        # With what has changed since the last step none was taken.
        if step != self._last_step:
            self._plan, self._last_step = plan, step
            self._log.layers(step, table)
        return {row["path"]: row["compute_dtype"] for row in table}
