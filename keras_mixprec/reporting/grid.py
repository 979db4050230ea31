"""A metric of every layer by steps, as the page is sent it."""

import json
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np

# What the page is sent headroom in: to 1/128 of a bit, up to 16 bits.
HEADROOM_DTYPE = "float16"


def as_sent(headroom: np.ndarray) -> np.ndarray:
    """Returns headroom as the page is sent it, so that all say the same.

    Args:
        headroom: Float array.
    """
    return headroom.astype(HEADROOM_DTYPE).astype(headroom.dtype)


class Grid(NamedTuple):
    """A metric of every layer, by steps.

    Attributes:
        layers: List of strings, the rows.
        first, last: Integer arrays, the steps that each column begins and
            ends with.
        worst: Array `[layers, columns]`, NaN where nothing was measured.
        pool: String. `"min"` or `"max"`, whichever is the worse.
        dtype: String. What the page is sent its numbers in: `"float16"`, of
            four digits, where the range is enough for it, or `"bfloat16"`.
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

    def to_bytes(self, passed: list | tuple = ()) -> bytes:
        """Returns it for the page.

        Args:
            passed: List of dicts, as `PassedCells.groups` returns it.

        Returns:
            Bytes: the length of a header as a little-endian uint32, the
            header as JSON padded with spaces to a multiple of four, and the
            numbers as little-endian float16 or bfloat16, as the header says,
            a row for each layer.
        """
        header = {
            "layers": self.layers,
            "from": self.first.tolist(),
            "until": self.last.tolist(),
            "pool": self.pool,
            "dtype": self.dtype,
            "bad_input": {
                "rows": np.flatnonzero(self.lost.any(axis=1)).tolist(),
                "columns": np.flatnonzero(self.lost.any(axis=0)).tolist(),
            },
            "passed": list(passed),
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 4)
        body = self.worst.astype(ml_dtypes.finfo(self.dtype).dtype)
        size = struct.pack("<I", len(text))
        return size + text + body.view("uint16").astype("<u2").tobytes()
