"""What was measured of each layer, by step, in tags of bounded size."""

import numpy as np

from keras_mixprec.reporting import schema
from keras_mixprec.reporting.thinning import Thinning, pooled


class HeatTables:
    """A family of tables by step, in tags with the same rows and columns.

    Args:
        family: String. What the tags begin with.
        index: Int >= 0. Number of the first tag.
    """

    def __init__(self, family, index):
        self._family = family
        self._index = index - 1
        self._columns = self._tag_columns = None
        self._steps = 0
        self._thinning = Thinning()
        self._waiting = None

    def add(self, step, table, layers, metrics):
        """Adds a table.

        Args:
            step: Int.
            table: Array `[layers, metrics]`.
            layers: List of the paths of the rows.
            metrics: Dict from the names of the columns to `"min"` or `"max"`.

        Returns:
            List of `(step, tag, table, content)` to write now.
        """
        columns = {"layers": layers, "metrics": metrics}
        ready = self.rest() if columns != self._columns else []
        self._columns = columns
        if self._waiting:
            table = _worse(metrics.values(), self._waiting[1], table)
        self._waiting = step, table
        return [*ready, *(self.rest() if self._thinning.due() else [])]

    def rest(self):
        """Returns what waits to be written, as `add` does: one or none."""
        if not self._waiting:
            return []
        (step, table), self._waiting = self._waiting, None
        full = self._steps == schema.HEAT_STEPS_PER_TAG
        if full or self._columns != self._tag_columns:
            self._index += 1
            self._tag_columns, self._steps = self._columns, 0
        self._steps += 1
        tag = schema.chunk_tag(self._family, self._index)
        return [(step, tag, table, self._columns)]


def _worse(pools, first, second):
    columns = zip(pools, first.T, second.T, strict=True)
    return np.stack([pooled(*column) for column in columns], axis=1)
