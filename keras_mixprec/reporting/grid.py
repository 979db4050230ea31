"""A metric of every layer by steps, as the page is sent it."""

import json
import math
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np

from keras_mixprec.reporting.layer_tables import pool_groups

# The page shows fewer columns than this at once, and a picture element that
# wide would be most of what a screen has.
MAX_COLUMNS = 2000

# What the page is sent headroom in: to 1/128 of a bit, up to 16 bits.
HEADROOM_DTYPE = "float16"

# Of a reading that is left out because the batch was not finite.
LEFT_OUT = 65535


def as_sent(headroom: np.ndarray) -> np.ndarray:
    """Returns headroom as the page is sent it, so that all say the same."""
    with np.errstate(over="ignore"):  # A damaged log has any numbers.
        return headroom.astype(HEADROOM_DTYPE).astype(headroom.dtype)


class Grid(NamedTuple):
    """A metric of every layer, by steps.

    Attributes:
        layers: List of strings, the rows.
        first, last: Integer arrays, the steps that each column begins and
            ends with.
        worst: Array `[layers, columns]`, NaN where nothing was measured.
        pool: String. `"min"` or `"max"`, whichever is the worse.
        dtype: String. What the page is sent its numbers to the precision of:
            `"float16"`, of four digits, where the range is enough for it, or
            `"bfloat16"`.
        lost: Boolean array `[layers, columns]`, where something is left out
            because the batch was not finite.
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
            origins: List of dicts, what made cells that are not the doing of
                their layers, in a `"long"` and a `"short"` form.
            cells: Integer array `[layers, columns]`, the place of an origin in
                the list, or -1.

        Returns:
            Bytes: the length of a header as a little-endian uint32, the
            header as JSON padded with spaces to a multiple of four, and the
            numbers as little-endian float32, a row for each layer; and if the
            header has `"marked"`, a uint16 for each: the place of its origin
            counted from 1, or `LEFT_OUT`.
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
        # As float32: half of the bits are 0, which a report compresses.
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
        tables: List of `Table`, all with that metric.
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
    if any(table.spoiled.any() for table in tables):  # As in few logs.
        rows = np.concatenate([t.lost(metric, layers) for t in tables])
        lost = np.logical_or.reduceat(rows, first).T
    # Counts and magnitudes go beyond float16.
    is_headroom = metric.endswith("headroom_bits")
    dtype = HEADROOM_DTYPE if is_headroom else "bfloat16"
    return Grid(layers, steps[first], steps[last], worst, pool, dtype, lost)
