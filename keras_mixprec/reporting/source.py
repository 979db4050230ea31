"""Where a run's log comes from: from files, or from a running TensorBoard."""

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np


class Point(NamedTuple):
    """A value of a tag.

    Attributes:
        step: Int.
        array: NumPy array, of bytes objects for strings.
    """

    step: int
    array: np.ndarray


class Source(Protocol):
    """Reads a run's log.

    Attributes:
        contents: Dict from each tag of ours to what its first value says of
            it: a dict with `"schema"`.
        histograms: List of the tags of histograms.
        written: Float. Time of the last value, in seconds since 1970.
    """

    contents: dict
    histograms: list
    written: float

    @property
    def version(self) -> Hashable:
        """Differs between logs, and from what it was once a log has grown."""

    def read(self, tag: str) -> list[Point]:
        """Returns the values of a tag by rising step."""

    def last(self, tag: str) -> Point | None:
        """Returns the last value of a tag, `None` if that is damaged."""


def points_size(points: list[Point]) -> int:
    """Returns the bytes that points take in memory, about."""
    return sum(_size(point.array) for point in points)


def _size(array):
    strings = sum(map(len, array.flat)) if array.dtype == object else 0
    return array.nbytes + strings
