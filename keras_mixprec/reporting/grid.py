"""A metric of every layer by steps, as the page is sent it."""

import json
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Grid(NamedTuple):
    """A metric of every layer, by steps.

    Attributes:
        layers: List of strings, the rows.
        first, last: Integer arrays, the steps that each column begins and
            ends with.
        worst: Array `[layers, columns]`, NaN where nothing was measured.
        pool: String. `"min"` or `"max"`, whichever is the worse.
        lost: Boolean array `[layers, columns]`, where something is left out
            because the batch was not finite.
    """

    layers: list
    first: np.ndarray
    last: np.ndarray
    worst: np.ndarray
    pool: str
    lost: np.ndarray

    def to_bytes(self) -> bytes:
        """Returns it for the page.

        Returns:
            Bytes: the length of a header as a little-endian uint32, the
            header as JSON padded with spaces to a multiple of four, and the
            numbers as little-endian bfloat16, a row for each layer. Three
            digits are more than a colour shows.
        """
        header = {
            "layers": self.layers,
            "from": self.first.tolist(),
            "until": self.last.tolist(),
            "pool": self.pool,
            "bad_input": {
                "rows": np.flatnonzero(self.lost.any(axis=1)).tolist(),
                "columns": np.flatnonzero(self.lost.any(axis=0)).tolist(),
            },
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 4)
        body = self.worst.astype(ml_dtypes.bfloat16).view("uint16")
        size = struct.pack("<I", len(text))
        return size + text + body.astype("<u2").tobytes()
