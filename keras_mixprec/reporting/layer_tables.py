"""Layer measurements by step: tables of bounded size, and heatmap grids."""

import dataclasses
import functools
import json
import math
import mmap
import re
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# The number of rows with the same interval. A run of a million steps with a
# reading every 100 steps then writes 2,156 rows instead of 10,000.
ROWS_PER_INTERVAL = 500

# The logs of models with more than 400 layers have fewer rows. The log of 2,000
# layers then takes 90 MB instead of 290 MB.
_LAYERS = 400

_POOLS = {"min": np.fmin, "max": np.fmax}


class Thinning:
    """Decides which rows of an endless series to write.

    First every row is written, `rows` times. Then every second row is written,
    again `rows` times, then every fourth row, and so on. The number of written
    rows grows with the logarithm of the run length.

    Args:
        rows: Int. The number of rows with the same interval. Defaults to `500`.

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
        """Returns whether to write the next row. Call `due` once per row."""
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
    """Returns the number of rows with the same interval.

    The number is smaller if rows are larger, which limits the size of a log.

    Args:
        count: Int >= 1. The number of layers or variables in a row.
        usual: Int >= 1. The largest count with the full number of rows.
        rows: Int >= 1. The full number of rows.

    Example:
    >>> from keras_mixprec.reporting.layer_tables import rows_for
    >>> [rows_for(layers, 400, 500) for layers in (10, 400, 2000, 100_000)]
    [500, 500, 100, 16]
    """
    return max(min(rows, 16), rows * usual // max(count, usual))


def pooled(pool: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the elementwise worse of two arrays, ignoring NaNs.

    Args:
        pool: String. `"min"` or `"max"`, whichever is worse.
        first: Array.
        second: Array of the same shape.
    """
    return _POOLS[pool](first, second)


def pool_groups(pool: str, rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the worst values in each group of rows.

    Args:
        pool: String, as in `pooled`.
        rows: Array `[n, ...]`, n >= 1.
        size: Int >= 1. Rows per group. The last group may have fewer.
    """
    starts = np.arange(0, len(rows), size)
    return _POOLS[pool].reduceat(rows, starts, axis=0)


class LayerTables:
    """Pools layer measurements, so that long runs write fewer rows."""

    def __init__(self):
        self._columns = self._thinning = self._waiting = None

    def add(self, step, table, layers, metrics):
        """Adds a table.

        Args:
            step: Int.
            table: Array `[layers, metrics]`.
            layers: List of strings. The layer of each row.
            metrics: Dict from column names to `"min"` or `"max"`.

        Returns:
            List of `(step, table, columns)` to write now. `columns` is a dict
            with `"layers"` and `"metrics"`.
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
        """Returns the table that is not written yet, if any, as `add` does."""
        if not self._waiting:
            return []
        (step, table), self._waiting = self._waiting, None
        return [(step, table, self._columns)]


def _worse(pools, first, second):
    columns = zip(pools, first.T, second.T, strict=True)
    return np.stack([pooled(*column) for column in columns], axis=1)


# Parts of a layer whose ranges depend on the batch. Ranges of weights do not.
_OF_BATCH = ("activation", "weight_gradient", "gradient")
_LOGITS = "attention_logits_largest"

# The suffix of the names of a layer's second and later calls.
_SECOND_CALL = re.compile(r"#\d+$")


@dataclasses.dataclass(frozen=True)
class Table:
    """Layer measurements by step, all with the same layers and metrics.

    Attributes:
        layers: List of strings, the names of layer calls.
        metrics: Dict from names to `"min"` or `"max"`, whichever is worse.
        records: Memory map of `schema.record_dtype`.
        spoiled: Boolean array, true for steps with a non-finite batch.
    """

    layers: list
    metrics: dict
    records: np.memmap
    spoiled: np.ndarray

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """The steps of the table's rows."""
        steps = np.array(self.records["step"])
        self._free()
        return steps

    def column(self, metric: str, layers: list) -> np.ndarray:
        """Returns a metric of layers by step.

        Args:
            metric: String.
            layers: List of strings that includes all of `self.layers`.

        Returns:
            Array `[steps, layers]`. It has NaN for missing measurements, and
            for tensors that a non-finite batch made non-finite. The headroom of
            other non-finite tensors is minus infinity, because their finite
            elements alone would look healthy. Shares that ignore zeros are
            infinite if all elements are zero.
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
        """Returns whether a metric was measured in any layer at any step."""
        # Search row by row, because most metrics have a value in row 0.
        rows = self.records["values"][:, self._place(metric)]
        found = any(not np.isnan(row).all() for row in rows)
        self._free()
        return found

    def lost(self, metric: str, layers: list) -> np.ndarray:
        """Returns where a bad batch hides a metric.

        Args:
            metric: String.
            layers: List of strings, as in `column`.

        Returns:
            Boolean array `[steps, layers]`.
        """
        return self._moved(self._lost(metric), layers, False)

    def _lost(self, metric):
        if not self.spoiled.any():
            return np.zeros((len(self.steps), len(self.layers)), bool)
        return self._nonfinite(metric) & self.spoiled[:, None]

    def _nonfinite(self, metric):
        """Marks non-finite tensors that depend on the batch."""
        if metric == _LOGITS:
            return self._values(metric) == np.inf
        part = next((p for p in _OF_BATCH if metric.startswith(f"{p}_")), None)
        count = f"{part}_nonfinite"
        if count not in self.metrics:
            return np.zeros((len(self.steps), len(self.layers)), bool)
        return self._values(count) > 0

    def _moved(self, own, layers, fill):
        if layers == self.layers:
            return own
        places = {name: place for place, name in enumerate(layers)}
        result = np.full((len(own), len(layers)), fill, own.dtype)
        result[:, [places[name] for name in self.layers]] = own
        return result

    def _values(self, metric):
        values = np.array(self.records["values"][:, self._place(metric)])
        self._free()
        return values

    def _free(self):
        """Frees memory of the map, which would grow to the file's size."""
        base: Any = self.records.base
        if hasattr(mmap, "MADV_DONTNEED"):  # Windows has no `madvise`.
            base.madvise(mmap.MADV_DONTNEED)

    def _place(self, metric):
        return list(self.metrics).index(metric)


def rows_in_order(tables: list, paths: list) -> list:
    """Returns the rows of all tables in the order of the model.

    Args:
        tables: List of `Table`.
        paths: List of strings, the layers of the model.
    """
    # Layers that the model no longer has keep the order of the last table.
    rows = dict.fromkeys(row for t in reversed(tables) for row in t.layers)
    places = {path: place for place, path in enumerate(paths)}
    return sorted(
        rows, key=lambda row: places.get(layer_of(row, places), len(places))
    )


def layer_of(row: str, paths) -> str:
    """Returns the path of the layer that a row belongs to.

    A layer with two calls has the rows `path` and `path#1`.
    """
    return row if row in paths else _SECOND_CALL.sub("", row)


# The maximum number of columns in a grid. A heatmap on a usual screen is
# narrower in pixels.
MAX_COLUMNS = 2000

# The dtype of headroom for the page. Its error is at most 1/128 bit up to 16
# bits of headroom.
HEADROOM_DTYPE = "float16"

# The mark of a cell whose reading is on a non-finite batch.
LEFT_OUT = 65535


def as_sent(headroom: np.ndarray) -> np.ndarray:
    """Rounds headroom as the page does, so that all outputs agree."""
    with np.errstate(over="ignore"):  # Damaged headroom may overflow.
        return headroom.astype(HEADROOM_DTYPE).astype(headroom.dtype)


class Grid(NamedTuple):
    """A metric of every layer by step.

    Attributes:
        layers: List of strings, the rows.
        first, last: Integer arrays, the first and last step of each column.
        worst: Array `[layers, columns]`, NaN where nothing was measured.
        pool: String. `"min"` or `"max"`, whichever is worse.
        dtype: String. The precision of numbers for the page: `"float16"`, or
            `"bfloat16"` for metrics with a larger range.
        lost: Boolean array `[layers, columns]`, true where a non-finite batch
            hides a reading.
    """

    layers: list
    first: np.ndarray
    last: np.ndarray
    worst: np.ndarray
    pool: str
    dtype: str
    lost: np.ndarray

    def to_bytes(self, origins: list, cells: np.ndarray) -> bytes:
        """Returns the grid as bytes for the page.

        Args:
            origins: List of dicts from `passed_cells`.
            cells: Integer array from `passed_cells`.

        Returns:
            Little-endian bytes. A uint32 has the length of the header, which is
            JSON padded with spaces to a multiple of four. A float32 for each
            cell follows, layer by layer. If `"marked"` is true in the header, a
            uint16 for each cell is next: the index of its origin plus 1, or
            `LEFT_OUT`.
        """
        is_marked = bool(origins) or bool(self.lost.any())
        header = {
            "layers": self.layers,
            "from": self.first.tolist(),
            "until": self.last.tolist(),
            "pool": self.pool,
            "origins": origins,
            "marked": is_marked,
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 4)
        with np.errstate(over="ignore"):
            body = self.worst.astype(ml_dtypes.finfo(self.dtype).dtype)
        size = struct.pack("<I", len(text))
        # The lower half of each float32 is 0, so the values compress well.
        sent = size + text + body.astype("<f4").tobytes()
        marks = np.where(self.lost, LEFT_OUT, cells + 1).astype("<u2")
        return sent + marks.tobytes() * is_marked

    def to_dict(self) -> dict:
        """Returns the last step of each column, and the numbers by layer."""
        rows = zip(self.layers, self.worst.tolist(), strict=True)
        return {"steps": self.last.tolist(), "values": dict(rows)}


def pooled_grid(tables: list, metric: str, layers: list, columns: int) -> Grid:
    """Returns the grid of a metric, with the worst value in each cell.

    Args:
        tables: List of `Table`, each with that metric.
        metric: String.
        layers: List of strings, the rows.
        columns: Int >= 1. The maximum number of columns to return.
    """
    pool = tables[-1].metrics[metric]
    steps = np.concatenate([table.steps for table in tables])
    rows = np.concatenate([table.column(metric, layers) for table in tables])
    size = math.ceil(len(rows) / min(columns, MAX_COLUMNS))
    first = np.arange(0, len(rows), size)
    last = np.minimum(first + size, len(rows)) - 1
    worst = pool_groups(pool, rows, size).T
    lost = np.zeros(worst.shape, bool)
    if any(table.spoiled.any() for table in tables):
        rows = np.concatenate([t.lost(metric, layers) for t in tables])
        lost = np.logical_or.reduceat(rows, first).T
    # Only headroom is rounded to float16, because counts and magnitudes can
    # exceed the range of float16.
    is_headroom = metric.endswith("headroom_bits")
    dtype = HEADROOM_DTYPE if is_headroom else "bfloat16"
    return Grid(layers, steps[first], steps[last], worst, pool, dtype, lost)
