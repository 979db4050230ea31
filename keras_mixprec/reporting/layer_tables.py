"""Tables of what was measured of each layer, by step, of bounded size."""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np

# What a run of a million steps, read every 100, comes to with 500 rows at
# each interval: 2,156 rows of 10,000. TensorBoard holds them in memory.
ROWS_PER_INTERVAL = 500

# So many layers have that many rows; more of them have fewer, so that a log of
# 2,000 layers has 90 MB of it instead of 290.
_LAYERS = 400

_POOLS = {"min": np.fmin, "max": np.fmax}


class Thinning:
    """Says which of an endless series of rows to write.

    All at first; every second once `rows` were written, every fourth once
    as many more were, and so on, so that the series grows with the logarithm
    of the run.

    Args:
        rows: Int. Rows at each interval. Defaults to `500`.

    Example:
    >>> from keras_mixprec.reporting.layer_tables import Thinning
    >>> thinning = Thinning(rows=2)
    >>> [n for n in range(14) if thinning.due()]
    [0, 1, 3, 5, 9, 13]
    """

    def __init__(self, rows: int = ROWS_PER_INTERVAL):
        self._rows = rows
        self._interval = 1
        self._waited = self._written = 0

    def due(self) -> bool:
        """Whether to write the next row; call it once for each."""
        self._waited += 1
        if self._waited < self._interval:
            return False
        self._waited = 0
        self._written += 1
        if self._written == self._rows:
            self._written = 0
            self._interval *= 2
        return True


def rows_for(count: int, usual: int, rows: int) -> int:
    """Returns the rows of an interval, so that a log stays as large as usual.

    Args:
        count: Int >= 1. What a row has numbers of: layers, variables.
        usual: Int >= 1. Up to so many of them there are `rows`.
        rows: Int >= 1.

    Example:
    >>> from keras_mixprec.reporting.layer_tables import rows_for
    >>> [rows_for(layers, 400, 500) for layers in (10, 400, 2000, 100_000)]
    [500, 500, 100, 16]
    """
    return max(min(rows, 16), rows * usual // max(count, usual))


def pooled(pool: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the worse of two arrays' elements, numbers before NaNs.

    Args:
        pool: String. `"min"` or `"max"`, whichever is the worse.
        first: Array.
        second: Array of the same shape.
    """
    return _POOLS[pool](first, second)


def pool_groups(pool: str, rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the worst of each group of rows, the last maybe a shorter one.

    Args:
        pool: As for `pooled`.
        rows: Array `[n, ...]`, n >= 1.
        size: Int >= 1. Rows of a group.
    """
    starts = np.arange(0, len(rows), size)
    return _POOLS[pool].reduceat(rows, starts, axis=0)


class LayerTables:
    """What is written of what was measured of layers, less of a long run."""

    def __init__(self):
        self._columns = self._thinning = self._waiting = None

    def add(self, step, table, layers, metrics):
        """Adds a table.

        Args:
            step: Int.
            table: Array `[layers, metrics]`.
            layers: List of the paths of the rows.
            metrics: Dict from the names of the columns to `"min"` or `"max"`.

        Returns:
            List of `(step, table, columns)` to write now, where columns are a
            dict of layers and metrics.
        """
        columns = {"layers": layers, "metrics": metrics}
        if self._thinning is None:
            rows = rows_for(len(layers), _LAYERS, ROWS_PER_INTERVAL)
            self._thinning = Thinning(rows)
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
        return [(step, table, self._columns)]


def _worse(pools, first, second):
    columns = zip(pools, first.T, second.T, strict=True)
    return np.stack([pooled(*column) for column in columns], axis=1)


# The parts of a layer that follow from the batch; weights do not.
_OF_BATCH = ("activation", "weight_gradient", "gradient")
_LOGITS = "attention_logits_largest"

# What follows the path of a layer in the name of a call but its first.
_SECOND_CALL = re.compile(r"#\d+$")


@dataclasses.dataclass(frozen=True)
class Table:
    """Measurements of layers by step, with the same layers and metrics.

    Attributes:
        layers: List of strings, the names of calls of layers.
        metrics: Dict from names to `"min"` or `"max"`, whichever is the worse.
        records: Array of `schema.record_dtype`.
        spoiled: Boolean array. Of which steps the batch was not finite.
    """

    layers: list
    metrics: dict
    records: np.ndarray
    spoiled: np.ndarray

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """The steps of its rows."""
        return np.array(self.records["step"])

    def column(self, metric: str, layers: list) -> np.ndarray:
        """Returns one metric of these layers.

        Args:
            metric: String.
            layers: List of strings, all of `self.layers` among them.

        Returns:
            Array `[steps, layers]`, NaN where nothing was measured. The
            headroom of a tensor with an infinity or a NaN is minus infinity:
            its finite elements alone would look sound. For the same reason
            the shares that vanish and that lose digits, which leave zeros
            out, are infinite where all elements are zero. What is not finite
            because the batch was not is NaN.
        """
        own = self._values(metric)
        count = metric.removesuffix("headroom_bits") + "nonfinite"
        if metric.endswith("headroom_bits") and count in self.metrics:
            own = np.where(self._values(count) > 0, -np.inf, own)
        part, _, quantity = metric.rpartition("_")
        zero = f"{part}_zero"
        if quantity in ("below", "subnormal") and zero in self.metrics:
            own = np.where(self._values(zero) == 1, np.inf, own)
        if self.spoiled.any():
            own = np.where(self._lost(metric), np.nan, own)
        return self._moved(own.astype("float32", copy=False), layers, np.nan)

    def has_values(self, metric: str) -> bool:
        """Returns whether a metric was measured of any layer at any step."""
        return not np.isnan(self._values(metric)).all()

    def lost(self, metric: str, layers: list) -> np.ndarray:
        """Returns of which layers a bad batch left nothing to know.

        Args:
            metric: String.
            layers: As for `column`.

        Returns:
            Boolean array `[steps, layers]`.
        """
        return self._moved(self._lost(metric), layers, False)

    def _lost(self, metric):
        if not self.spoiled.any():
            return np.zeros((len(self.steps), len(self.layers)), bool)
        return self._nonfinite(metric) & self.spoiled[:, None]

    def _nonfinite(self, metric):
        """Where what a metric is of was not finite, if it follows the batch."""
        if metric == _LOGITS:
            return self._values(metric) == np.inf
        part = next((p for p in _OF_BATCH if metric.startswith(f"{p}_")), None)
        count = f"{part}_nonfinite"
        if count not in self.metrics:
            return np.zeros((len(self.steps), len(self.layers)), bool)
        return self._values(count) > 0

    def _moved(self, own, layers, fill):
        if layers == self.layers:  # As in most logs: nothing is to be moved.
            return own
        places = {name: place for place, name in enumerate(layers)}
        result = np.full((len(own), len(layers)), fill, own.dtype)
        result[:, [places[name] for name in self.layers]] = own
        return result

    def _values(self, metric):
        return self.records["values"][:, list(self.metrics).index(metric)]


def split_rows(tables: list, spoiled: Callable) -> list:
    """Returns tables that know which of their rows are of a bad batch.

    Args:
        tables: List of `Table`, those of a family by rising step.
        spoiled: Function from the steps of all of them to a boolean array.
    """
    if not tables:
        return []
    marks = spoiled(np.concatenate([table.steps for table in tables]))
    ends = np.cumsum([len(table.steps) for table in tables])[:-1]
    return [
        dataclasses.replace(table, spoiled=rows)
        for table, rows in zip(tables, np.split(marks, ends), strict=True)
    ]


def rows_in_order(tables: list, paths: list) -> list:
    """Returns the rows of all tables, layers in the order of the model.

    Args:
        tables: List of `Table`.
        paths: List of strings, the layers of the model.
    """
    # Those that the model does not have are in the order of the last table:
    # layers may have come and gone.
    rows = dict.fromkeys(row for t in reversed(tables) for row in t.layers)
    places = {path: place for place, path in enumerate(paths)}
    return sorted(
        rows, key=lambda row: places.get(layer_of(row, places), len(places))
    )


def layer_of(row: str, paths) -> str:
    """Returns the path of the layer whose call a row is.

    A layer that is used twice has the rows `path` and `path#1`.
    """
    return row if row in paths else _SECOND_CALL.sub("", row)
