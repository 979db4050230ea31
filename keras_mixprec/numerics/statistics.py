"""The range of tensors, from one pass over each."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import Format

# A float32 keeps its biased exponent in eight bits: 0 is zero (and what is
# below every normal float32), 255 is infinity or NaN, and `k` a magnitude of
# at least `2**(k - 127)` and less than twice that.
_EXPONENTS = 256
_BIAS = 127
_MANTISSA_BITS = 23

# Numbers in a row of what `pack` returns.
WIDTH = 3 + _EXPONENTS


def measure(tensors) -> tuple:
    """Returns the statistics of several tensors of one shape.

    Runs on the device, traced or not. Counting all exponents takes as long as
    counting what is zero, or subnormal, or not finite: 1 to 2 ns an element
    on a CPU.

    Args:
        tensors: Float tensor `(k, n)` of any dtype. What float32 cannot hold
            of a float64 counts as infinite.

    Returns:
        Tuple of the largest finite magnitudes, float32 `(k,)`; the root mean
        squares, infinities and NaNs taken for zeros, float32 `(k,)`; and how
        many elements have each float32 exponent and first bit of the mantissa,
        which separates NaN from infinity, int `(k, 512)`.
    """
    return active.probe().measure(tensors)


def statistics_of(array: np.ndarray) -> "Statistics":
    """Returns the statistics of an array in the host's memory.

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
        np.pad(counts.cumsum(), (1, 0)),
        float(finite.max(initial=0.0)),
        math.sqrt(
            np.square(finite, dtype="float64").sum() / max(finite.size, 1)
        ),
        int(np.isnan(values).sum()),
    )


def pack(measured: Sequence[tuple]):
    """Returns a float32 tensor with a row for each tensor that was measured.

    `Statistics.from_rows` reads it. Counts are exact up to `2**24` elements
    each, and within one in `2**24` beyond.

    Args:
        measured: List of what `measure` returned.
    """
    together = [ops.concatenate(parts) for parts in zip(*measured, strict=True)]
    largest, rms, counts = together
    nan = counts[:, -1:]
    counts = ops.reshape(counts, (counts.shape[0], _EXPONENTS, 2))
    counts = ops.concatenate([nan, ops.sum(counts, axis=-1)], axis=1)
    numbers = ops.stack([largest, rms], axis=1)
    return ops.concatenate([numbers, ops.cast(counts, "float32")], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """The range of one tensor, or of several taken together.

    Of several side by side, each number is an array: see `stacked`.

    Attributes:
        cumulative: Int array `(257,)`: how many elements have a float32
            exponent below each, from 0 to 256. Those of exponent 0 are zeros,
            of 255 infinities and NaNs.
        largest: Float. Largest finite magnitude, 0 if there is none.
        rms: Float. Root mean square of the finite elements.
        nan: Int. Number of NaNs.

    Example:
    >>> from keras_mixprec.formats import get_format
    >>> from keras_mixprec.numerics.statistics import Statistics, measure, pack
    >>> tensor = keras.ops.convert_to_tensor([[0.0, 2.0**-20, 1.0, 2.0**14]])
    >>> rows = keras.ops.convert_to_numpy(pack([measure(tensor)]))
    >>> [found] = Statistics.from_rows(rows)
    >>> round(float(found.headroom_bits(get_format("float16"))), 2)
    2.0
    >>> float(found.zero), float(found.subnormal(get_format("float16")))
    (0.25, 0.25)
    """

    cumulative: Any
    largest: Any
    rms: Any
    nan: Any

    @classmethod
    def from_rows(
        cls, rows: np.ndarray, groups: Sequence[int] | None = None
    ) -> list["Statistics"]:
        """Reads what `pack` returned.

        Args:
            rows: Float array `(k, WIDTH)`.
            groups: List of int, from 0 to the last without a gap: which of
                the results each row is a part of. Defaults to a result a row.
        """
        rows = rows.astype("float64")
        if groups is not None:
            rows = _merged(rows, groups)
        counts = np.rint(rows[:, 3:]).astype("int64")
        cumulative = np.pad(counts.cumsum(axis=1), ((0, 0), (1, 0)))
        sizes, finite = cumulative[:, -1], cumulative[:, -2]
        largest, rms, nan = rows[:, :3].T
        shares = np.sqrt(sizes / np.maximum(finite, 1))
        columns = (
            np.where(finite, largest, 0.0).tolist(),
            np.where(finite, rms * shares, 0.0).tolist(),
            nan.astype(int).tolist(),
        )
        return [*map(cls, cumulative, *columns)]

    @classmethod
    def stacked(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Returns one whose numbers are arrays, with an element for each."""
        names = [field.name for field in dataclasses.fields(cls)]
        stacks = [np.stack([getattr(p, name) for p in parts]) for name in names]
        return cls(*stacks)

    @classmethod
    def together(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Returns the statistics of all elements of several tensors."""
        if len(parts) == 1:
            return parts[0]
        sizes = [p.size - p.nonfinite for p in parts]
        squares = math.fsum(
            n * p.rms**2 for n, p in zip(sizes, parts, strict=True)
        )
        return cls(
            np.sum([p.cumulative for p in parts], axis=0),
            max(p.largest for p in parts),
            math.sqrt(squares / max(sum(sizes), 1)),
            sum(p.nan for p in parts),
        )

    @property
    def counts(self) -> np.ndarray:
        """How many elements have each exponent, int array `(256,)`."""
        return np.diff(self.cumulative)

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
        """Share of elements that a format holds with fewer digits."""
        return self._share(
            _index(limits.smallest_subnormal), _index(limits.smallest_normal)
        )

    def below(self, limits: Format) -> float:
        """Share of elements that are not zero but below all of a format."""
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
            128, which no finite float32 has.
        """
        counts = self.counts[1:]
        (used,) = np.nonzero(counts)
        if not used.size:
            return np.zeros((0, 3))
        exponents = np.arange(used[0], used[-1] + 1) + 1 - _BIAS
        counts = counts[used[0] : used[-1] + 1]
        return np.stack([exponents, exponents + 1, counts], axis=1)

    def _share(self, start, stop):
        count = self.cumulative[..., stop] - self.cumulative[..., start]
        return count / np.maximum(self.size, 1)


def _merged(rows, groups):
    """The rows of all elements of each group of tensors."""
    order = np.argsort(groups, kind="stable")
    rows, groups = rows[order], np.asarray(groups)[order]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    sizes = rows[:, 3:].sum(axis=1)
    merged = np.add.reduceat(rows, starts)
    merged[:, 0] = np.maximum.reduceat(rows[:, 0], starts)
    squares = np.add.reduceat(sizes * rows[:, 1] ** 2, starts)
    merged[:, 1] = np.sqrt(squares / np.maximum(merged[:, 3:].sum(axis=1), 1))
    return merged


def _index(power_of_two):
    return max(int(math.log2(power_of_two)) + _BIAS, 1)
