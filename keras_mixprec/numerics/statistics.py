"""The range of tensors, from one pass over each."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import Format, get_format

# A float32 keeps its biased exponent in eight bits: 0 is zero (and what is
# below every normal float32), 255 is infinity or NaN, and `k` a magnitude of
# at least `2**(k - 127)` and less than twice that.
_EXPONENTS = 256
_BIAS = 127
_MANTISSA_BITS = 23

# What a row of a light reading consists of. That of a full one has the first
# three, then how many elements have each exponent.
COLUMNS = (
    "largest",
    "rms",
    "nan",
    "size",
    "nonzero",
    "from_subnormal",
    "from_normal",
    "nonfinite",
)
_NUMBERS = 3
_FULL_EDGES = range(_EXPONENTS + 1)


def measure(tensors, limits: Format):
    """Returns a light reading of several tensors of one shape.

    Runs on the device, traced or not: reductions alone, which compilers fuse.
    Counting all exponents takes two to four times as long, and to compile.

    Args:
        tensors: Float tensor `(k, n)` of any dtype. What float32 cannot hold
            of a float64 counts as infinite.
        limits: `Format` whose subnormal numbers are counted, and what is below
            them.

    Returns:
        Float32 tensor with a row for each, which `Statistics.from_rows` reads.
        Counts are exact up to `2**24` elements each, and within one in `2**24`
        beyond.
    """
    dtype = keras.backend.standardize_dtype(tensors.dtype)
    lowest = _index(get_format(dtype).smallest_subnormal)
    # Of float16 numbers none is below all but zero: that is counted once.
    floors = [max(edge, lowest) for edge in _edges(limits)[1:-2]]
    return active.probe().measure(tensors, floors)


def measure_exponents(tensors):
    """Returns a full reading: how many elements have each exponent.

    Args:
        tensors: As for `measure`.

    Returns:
        Float32 tensor with a longer row for each, as for `measure`.
    """
    numbers = active.probe().measure(tensors, ())[:, :_NUMBERS]
    counts = active.probe().exponents(tensors)
    return ops.concatenate([numbers, ops.cast(counts, "float32")], axis=1)


def statistics_of(array: np.ndarray) -> "Statistics":
    """Returns the full statistics of an array in the host's memory.

    On a CPU that takes a tenth of the time that a tensor's operations do one by
    one, and nothing has to be compiled.

    Args:
        array: Float array of any shape and dtype.
    """
    with np.errstate(over="ignore"):
        values = np.ravel(array).astype("float32")
    magnitudes = np.abs(values)
    exponents = magnitudes.view("int32") >> _MANTISSA_BITS
    finite = magnitudes[exponents < _EXPONENTS - 1]
    counts = np.bincount(exponents, minlength=_EXPONENTS)
    return Statistics(
        _FULL_EDGES,
        np.pad(counts.cumsum(), (1, 0)),
        float(finite.max(initial=0.0)),
        math.sqrt(
            np.square(finite, dtype="float64").sum() / max(finite.size, 1)
        ),
        int(np.isnan(values).sum()),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """The range of one tensor, or of several taken together.

    Of several side by side, each number is an array: see `stacked`.

    Attributes:
        edges: Sequence of int, rising float32 exponents from 0 to 256: all of
            them, or those of a light reading.
        cumulative: Int array: how many elements have an exponent below each
            edge. Those of exponent 0 are zeros, of 255 infinities and NaNs.
        largest: Float. Largest finite magnitude, 0 if there is none.
        rms: Float. Root mean square of the finite elements.
        nan: Int. Number of NaNs.

    Example:
    >>> from keras_mixprec.formats import get_format
    >>> from keras_mixprec.numerics.statistics import Statistics, measure
    >>> limits = get_format("float16")
    >>> tensor = keras.ops.convert_to_tensor([[0.0, 2.0**-20, 1.0, 2.0**14]])
    >>> rows = keras.ops.convert_to_numpy(measure(tensor, limits))
    >>> [found] = Statistics.from_rows(rows, limits)
    >>> round(float(found.headroom_bits(limits)), 2)
    2.0
    >>> float(found.zero), float(found.subnormal(limits))
    (0.25, 0.25)
    """

    edges: Sequence[int]
    cumulative: Any
    largest: Any
    rms: Any
    nan: Any

    @classmethod
    def from_rows(
        cls,
        rows: np.ndarray,
        limits: Format,
        groups: Sequence[int] | None = None,
    ) -> list["Statistics"]:
        """Reads the rows of light readings, or of full ones.

        Args:
            rows: Float array, what `measure` or `measure_exponents` returned.
            limits: As for `measure`.
            groups: List of int, from 0 to the last without a gap: which of
                the results each row is a part of. Defaults to a result a row.
        """
        rows = rows.astype("float64")
        if groups is not None:
            rows = _merged(rows, groups)
        counts = np.rint(rows[:, _NUMBERS:]).astype("int64")
        if _is_light(rows):
            edges, cumulative = _edges(limits), counts[:, :1] - counts
            cumulative = np.append(cumulative, counts[:, :1], axis=1)
        else:
            edges = _FULL_EDGES
            cumulative = np.pad(counts.cumsum(axis=1), ((0, 0), (1, 0)))
        sizes, finite = cumulative[:, -1], cumulative[:, -2]
        largest, rms, nan = rows[:, :_NUMBERS].T
        shares = np.sqrt(sizes / np.maximum(finite, 1))
        columns = (
            np.where(finite, largest, 0.0).tolist(),
            np.where(finite, rms * shares, 0.0).tolist(),
            nan.astype(int).tolist(),
        )
        return [
            cls(edges, *of_row)
            for of_row in zip(cumulative, *columns, strict=True)
        ]

    @classmethod
    def stacked(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Returns one whose numbers are arrays, with an element for each.

        Args:
            parts: List of `Statistics`, all light or all full.
        """
        _, *names = [field.name for field in dataclasses.fields(cls)]
        stacks = [np.stack([getattr(p, name) for p in parts]) for name in names]
        return cls(parts[0].edges, *stacks)

    @classmethod
    def together(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Returns the statistics of all elements of several tensors.

        Args:
            parts: As for `stacked`.
        """
        if len(parts) == 1:
            return parts[0]
        sizes = [p.size - p.nonfinite for p in parts]
        squares = math.fsum(
            n * p.rms**2 for n, p in zip(sizes, parts, strict=True)
        )
        return cls(
            parts[0].edges,
            np.sum([p.cumulative for p in parts], axis=0),
            max(p.largest for p in parts),
            math.sqrt(squares / max(sum(sizes), 1)),
            sum(p.nan for p in parts),
        )

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.cumulative[..., -1]

    @property
    def nonfinite(self) -> int:
        """Number of infinities and NaNs."""
        return self.cumulative[..., -1] - self.cumulative[..., -2]

    @property
    def infinite(self) -> int:
        """Number of infinities."""
        return self.nonfinite - self.nan

    @property
    def zero(self) -> float:
        """Share of elements that are zero."""
        return self._share(0, 1)

    def subnormal(self, limits: Format) -> float:
        """Share of elements that a format holds with fewer digits.

        Of a light reading, of the format that it was taken for.
        """
        return self._share(
            _index(limits.smallest_subnormal), _index(limits.smallest_normal)
        )

    def below(self, limits: Format) -> float:
        """Share of elements that are not zero but below all of a format.

        Of a light reading, as `subnormal`.
        """
        return self._share(1, _index(limits.smallest_subnormal))

    def headroom_bits(self, limits: Format) -> float:
        """Bits by which the largest could grow, infinite if all are zero.

        Negative if it does not fit the format, and none if there are
        infinities already.
        """
        with np.errstate(divide="ignore"):
            bits = np.log2(np.divide(limits.maximum, self.largest))
        return np.where(self.infinite, np.minimum(bits, 0.0), bits)[()]

    def bins(self) -> np.ndarray:
        """Returns the histogram of exponents.

        Returns:
            Array `[k, 3]`: exponent, the next one, and the count of
            magnitudes between the two powers of two; infinities and NaNs at
            128, which no finite float32 has. Empty of a light reading, which
            has not counted them.
        """
        if self.edges is not _FULL_EDGES:
            return np.zeros((0, 3))
        counts = np.diff(self.cumulative)[1:]
        (used,) = np.nonzero(counts)
        if not used.size:
            return np.zeros((0, 3))
        exponents = np.arange(used[0], used[-1] + 1) + 1 - _BIAS
        counts = counts[used[0] : used[-1] + 1]
        return np.stack([exponents, exponents + 1, counts], axis=1)

    def _share(self, start, stop):
        start, stop = map(self.edges.index, (start, stop))
        count = self.cumulative[..., stop] - self.cumulative[..., start]
        return count / np.maximum(self.size, 1)


def _merged(rows, groups):
    """The rows of all elements of each group of tensors."""
    order = np.argsort(groups, kind="stable")
    rows, groups = rows[order], np.asarray(groups)[order]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    merged = np.add.reduceat(rows, starts)
    merged[:, 0] = np.maximum.reduceat(rows[:, 0], starts)
    squares = np.add.reduceat(_sizes(rows) * rows[:, 1] ** 2, starts)
    merged[:, 1] = np.sqrt(squares / np.maximum(_sizes(merged), 1))
    return merged


def _sizes(rows):
    counts = rows[:, _NUMBERS:]
    return counts[:, 0] if _is_light(rows) else counts.sum(axis=1)


def _is_light(rows):
    return rows.shape[1] == len(COLUMNS)


def _edges(limits):
    """The exponents that a light reading tells apart."""
    subnormal, normal = limits.smallest_subnormal, limits.smallest_normal
    return 0, 1, _index(subnormal), _index(normal), _EXPONENTS - 1, _EXPONENTS


def _index(power_of_two):
    return max(int(math.log2(power_of_two)) + _BIAS, 1)
