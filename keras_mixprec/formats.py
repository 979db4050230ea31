"""The floating-point formats: their largest and smallest numbers."""

import dataclasses
import functools

import ml_dtypes


@dataclasses.dataclass(frozen=True)
class Format:
    """The range and the resolution of a floating-point format.

    Attributes:
        name: String, as Keras spells the dtype.
        maximum: Float. Largest finite number.
        smallest_normal: Float. Below it numbers lose digits.
        smallest_subnormal: Float. Below half of it numbers become zero.
        epsilon: Float. Distance from 1 to the next larger number.
    """

    name: str
    maximum: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float


@functools.cache
def get_format(dtype: str) -> Format:
    """Returns the `Format` of a floating-point dtype, given by its name."""
    info = ml_dtypes.finfo(dtype)
    return Format(
        dtype,
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
        float(info.eps),
    )
