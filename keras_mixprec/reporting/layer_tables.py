"""Measurements of each layer by step: tables of bounded size, and grids."""

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

# A run of a million steps, read every 100, then has 2,156 of 10,000 rows.
ROWS_PER_INTERVAL = 500

# Models with more layers have fewer rows, so a log of 2,000 layers takes 90 MB
# instead of 290 MB.
_LAYERS = 400

_POOLS = {"min": np.fmin, "max": np.fmax}


class Thinning:
    """Says which rows of an endless series to write.

    It writes `rows` rows, then `rows` times every second one, then every fourth
    one and so on. So the series grows with the logarithm of the run.

    Args:
        rows: Int. How many rows each interval has. Defaults to `500`.

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
        """Returns whether to write the next row; call it once for each."""
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
    """Returns the rows of an interval, fewer where each row is larger.

    Args:
        count: Int >= 1. How many layers or variables a row describes.
        usual: Int >= 1. The largest count with the full number of rows.
        rows: Int >= 1. The full number of rows.

    Example:
    >>> from keras_mixprec.reporting.layer_tables import rows_for
    >>> [rows_for(layers, 400, 500) for layers in (10, 400, 2000, 100_000)]
    [500, 500, 100, 16]
    """
    return max(min(rows, 16), rows * usual // max(count, usual))


def pooled(pool: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the worse of two arrays' elements, ignoring NaNs.

    Args:
        pool: String. `"min"` or `"max"`, the worse end.
        first: Array.
        second: Array of the same shape.
    """
    return _POOLS[pool](first, second)


def pool_groups(pool: str, rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the worst of each group of rows; the last may be shorter.

    Args:
        pool: String, as in `pooled`.
        rows: Array `[n, ...]`, n >= 1.
        size: Int >= 1. Rows of a group.
    """
    starts = np.arange(0, len(rows), size)
    return _POOLS[pool].reduceat(rows, starts, axis=0)


class LayerTables:
    """Pools measurements of layers, so that a long run writes fewer rows."""

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
            List of `(step, table, columns)` to write now; `columns` is a dict
            of layers and metrics.
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
        """Returns the table that waits, if any, in the form of `add`."""
        if not self._waiting:
            return []
        (step, table), self._waiting = self._waiting, None
        return [(step, table, self._columns)]


def _worse(pools, first, second):
    columns = zip(pools, first.T, second.T, strict=True)
    return np.stack([pooled(*column) for column in columns], axis=1)


# Ranges that depend on the batch; those of weights do not.
_OF_BATCH = ("activation", "weight_gradient", "gradient")
_LOGITS = "attention_logits_largest"

# The end of the name of a layer's second or later call.
_SECOND_CALL = re.compile(r"#\d+$")


@dataclasses.dataclass(frozen=True)
class Table:
    """Measurements of layers by step, with the same layers and metrics.

    Attributes:
        layers: List of strings, the names of calls of layers.
        metrics: Dict from names to `"min"` or `"max"`, the worse end.
        records: Memory map of `schema.record_dtype`.
        spoiled: Boolean array, true for steps with a non-finite batch.
    """

    layers: list
    metrics: dict
    records: np.memmap
    spoiled: np.ndarray

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """The steps of its rows."""
        steps = np.array(self.records["step"])
        self._free()
        return steps

    def column(self, metric: str, layers: list) -> np.ndarray:
        """Returns one metric of these layers.

        Args:
            metric: String.
            layers: List of strings that includes all of `self.layers`.

        Returns:
            Array `[steps, layers]`, NaN for missing measurements and for
            non-finite tensors of a non-finite batch. The headroom of any other
            non-finite tensor is minus infinity, because its finite elements
            alone would look sound. Shares that ignore zeros are infinite if all
            elements are zero.
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
        # Most metrics have a value in the first row, so the rest is not read.
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
        if layers == self.layers:  # True of most logs.
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
        """Returns the memory of the map, which would grow to the whole file."""
        base: Any = self.records.base
        if hasattr(mmap, "MADV_DONTNEED"):  # Windows does not have it.
            base.madvise(mmap.MADV_DONTNEED)

    def _place(self, metric):
        return list(self.metrics).index(metric)


def rows_in_order(tables: list, paths: list) -> list:
    """Returns the rows of all tables in the order of the model.

    Args:
        tables: List of `Table`.
        paths: List of strings, the layers of the model.
    """
    # Layers that are gone from the model keep the order of the last table.
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


# A metric of all layers by step.

# More columns than the pixels that the heatmap has on a usual screen.
MAX_COLUMNS = 2000

# Headroom up to 16 bits is then exact to 1/128 bit.
HEADROOM_DTYPE = "float16"

# Marks a reading of a non-finite batch.
LEFT_OUT = 65535


def as_sent(headroom: np.ndarray) -> np.ndarray:
    """Returns headroom as rounded for the page, so all outputs agree."""
    with np.errstate(over="ignore"):  # A damaged log may have any numbers.
        return headroom.astype(HEADROOM_DTYPE).astype(headroom.dtype)


class Grid(NamedTuple):
    """A metric of every layer by step.

    Attributes:
        layers: List of strings, the rows.
        first, last: Integer arrays, the first and last step of each column.
        worst: Array `[layers, columns]`, NaN where nothing was measured.
        pool: String. `"min"` or `"max"`, the worse end.
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
        """Returns it for the page.

        Args:
            origins: List of dicts from `passed_cells`.
            cells: Integer array from `passed_cells`.

        Returns:
            Bytes, little-endian. A uint32 has the length of the header, which
            is JSON padded with spaces to a multiple of four. A float32 for each
            cell follows, a row for each layer. If the header has `"marked"`, a
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
        # Half of the bits are 0, which a report compresses.
        sent = size + text + body.astype("<f4").tobytes()
        marks = np.where(self.lost, LEFT_OUT, cells + 1).astype("<u2")
        return sent + marks.tobytes() * is_marked

    def to_dict(self) -> dict:
        """Returns the last step of each column, and the numbers by layer."""
        rows = zip(self.layers, self.worst.tolist(), strict=True)
        return {"steps": self.last.tolist(), "values": dict(rows)}


def pooled_grid(tables: list, metric: str, layers: list, columns: int) -> Grid:
    """Returns the worst of each column of a metric.

    Args:
        tables: List of `Table`, each with that metric.
        metric: String.
        layers: List of strings, the rows.
        columns: Int >= 1. The most columns to return.
    """
    pool = tables[-1].metrics[metric]
    steps = np.concatenate([table.steps for table in tables])
    rows = np.concatenate([table.column(metric, layers) for table in tables])
    size = math.ceil(len(rows) / min(columns, MAX_COLUMNS))
    first = np.arange(0, len(rows), size)
    last = np.minimum(first + size, len(rows)) - 1
    worst = pool_groups(pool, rows, size).T
    lost = np.zeros(worst.shape, bool)
    if any(table.spoiled.any() for table in tables):  # True of few logs.
        rows = np.concatenate([t.lost(metric, layers) for t in tables])
        lost = np.logical_or.reduceat(rows, first).T
    # Counts and magnitudes can exceed the range of float16.
    is_headroom = metric.endswith("headroom_bits")
    dtype = HEADROOM_DTYPE if is_headroom else "bfloat16"
    return Grid(layers, steps[first], steps[last], worst, pool, dtype, lost)
