"""A metric of every layer by step, and its form for the page."""

import json
import math
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np

from keras_mixprec.reporting.layer_tables import pool_groups

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
