"""The range of a tensor: the number of elements with each exponent."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mixprec.formats import Format

# A float32 has a biased exponent of eight bits. Exponent 0 means zero or a
# subnormal number, and 255 means infinity or NaN. Any other exponent `k` means
# a magnitude from `2**(k - 127)` to `2**(k - 126)`.
_EXPONENTS = 256
_BIAS = 127
_MANTISSA_BITS = 23


def measure(tensor):
    """Computes the statistics of a tensor on its device.

    Args:
        tensor: Float tensor of any shape and dtype. A float64 beyond the range
            of float32 counts as infinite.

    Returns:
        Float32 tensor that `Statistics.from_row` reads. Counts are exact up to
        `2**24`. Larger counts have a relative error of at most `2**-24`.
    """
    magnitudes = ops.abs(ops.cast(ops.reshape(tensor, (-1,)), "float32"))
    exponents = ops.right_shift(ops.view(magnitudes, "int32"), _MANTISSA_BITS)
    finite = ops.where(exponents < _EXPONENTS - 1, magnitudes, 0.0)
    # JAX cannot trace `bincount`. The other backends use `bincount`, because
    # torch's `segment_sum` counts in float32, which is exact only up to 2**24.
    if keras.backend.backend() == "jax":
        ones = ops.ones_like(exponents)
        counts = ops.segment_sum(ones, exponents, num_segments=_EXPONENTS)
    else:
        counts = ops.bincount(exponents, minlength=_EXPONENTS)
    nan = ops.sum(ops.cast(ops.isnan(magnitudes), "int32"))
    largest = ops.max(finite, initial=0.0)
    numbers = ops.stack([largest, ops.cast(nan, "float32")])
    return ops.concatenate([numbers, ops.cast(counts, "float32")])


def statistics_of(array: np.ndarray) -> "Statistics":
    """Returns the statistics of an array in the host's memory.

    On a CPU, NumPy takes a tenth of the time of a backend's operations, and
    compiles nothing.

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
        int(np.isnan(values).sum()),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """The range of one tensor, or of several stacked tensors.

    For stacked tensors each attribute is an array with one element per tensor.

    Attributes:
        cumulative: Int array `(257,)`. Element `k` is the number of elements
            with a biased float32 exponent below `k`. Exponent 0 means zero, and
            255 infinity or NaN.
        largest: Float. The largest finite magnitude, or 0.
        nan: Int. The number of NaNs.

    Example:
    >>> from keras_mixprec.formats import get_format
    >>> from keras_mixprec.numerics.statistics import statistics_of
    >>> limits = get_format("float16")
    >>> found = statistics_of(np.array([0.0, 2.0**-20, 1.0, 2.0**14]))
    >>> round(float(found.headroom_bits(limits)), 2)
    2.0
    >>> float(found.zero), float(found.subnormal(limits))
    (0.25, 0.25)
    """

    cumulative: Any
    largest: Any
    nan: Any

    @classmethod
    def from_row(cls, row: np.ndarray) -> "Statistics":
        """Reads the result of `measure`, converted to a NumPy array."""
        largest, nan, *counts = row.astype("float64").tolist()
        counts = np.rint(counts).astype("int64")
        return cls(np.pad(counts.cumsum(), (1, 0)), largest, int(nan))

    @classmethod
    def stacked(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Returns `Statistics` whose attributes stack those of all parts."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.stack([getattr(p, n) for p in parts]) for n in names))

    @classmethod
    def together(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Returns the statistics of all elements of several tensors."""
        return cls(
            np.sum([p.cumulative for p in parts], axis=0),
            max(p.largest for p in parts),
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
        """Returns the share of elements that are subnormal in a format."""
        return self._share(
            _index(limits.smallest_subnormal), _index(limits.smallest_normal)
        )

    def below(self, limits: Format) -> float:
        """Returns the share of nonzero elements too small for a format."""
        return self._share(1, _index(limits.smallest_subnormal))

    def headroom_bits(self, limits: Format) -> float:
        """Returns the headroom, the bits by which the largest number may grow.

        The headroom is infinite if all numbers are zero, and negative if the
        largest number does not fit the format. If there are infinities, the
        headroom is at most 0.
        """
        with np.errstate(divide="ignore"):
            bits = np.log2(np.divide(limits.maximum, self.largest))
        return np.where(self.infinite, np.minimum(bits, 0.0), bits)[()]

    def bins(self) -> np.ndarray:
        """Returns the histogram of exponents.

        Returns:
            Array `[k, 3]`. Each row has an exponent, the next exponent, and the
            count of magnitudes between these two powers of two. Infinities and
            NaNs count under 128, which no finite float32 reaches.
        """
        counts = np.diff(self.cumulative)[1:]
        (used,) = np.nonzero(counts)
        if not used.size:
            return np.zeros((0, 3))
        exponents = np.arange(used[0], used[-1] + 1) + 1 - _BIAS
        counts = counts[used[0] : used[-1] + 1]
        return np.stack([exponents, exponents + 1, counts], axis=1)

    def _share(self, start, stop):
        count = self.cumulative[..., stop] - self.cumulative[..., start]
        return count / np.maximum(self.size, 1)


def _index(power_of_two):
    return max(int(math.log2(power_of_two)) + _BIAS, 1)
