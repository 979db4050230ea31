"""Which loss scales a layer's gradients fit into."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.formats import get_format


class Window(NamedTuple):
    """The loss scales, as powers of two, at which gradients survive.

    Attributes:
        low: Float. Below it more than 1% of their energy underflows.
        high: Float. Above it the largest is within two bits of overflowing.
    """

    low: float
    high: float

    def holds(self, bits: float) -> bool:
        """Whether a loss scale of `2**bits` lies in the window."""
        return self.low <= bits <= self.high


ANY_SCALE = Window(-math.inf, math.inf)


def scale_window(
    gradients: Sequence[np.ndarray], dtype: str = "float16"
) -> Window:
    """Returns the window of gradients of the unscaled loss.

    After the adaptive loss scaling of Zhao et al., 2019 (arXiv 1910.12385),
    which gives each layer a scale from the same two bounds.

    Args:
        gradients: Float64 arrays, computed in float32.
        dtype: String. The format that they shall survive in.
    """
    values = np.concatenate([np.abs(g).ravel() for g in gradients] or [[]])
    values = np.sort(values[np.isfinite(values) & (values > 0)])[::-1]
    if not values.size:
        return ANY_SCALE
    limits = get_format(dtype)
    energy = np.cumsum(np.square(values / values[0]))
    count = np.searchsorted(energy, thresholds.KEPT_ENERGY * energy[-1])
    smallest = values[min(count, values.size - 1)]
    return Window(
        math.log2(limits.smallest_subnormal)
        + thresholds.BITS_BELOW
        - math.log2(smallest),
        math.log2(limits.maximum)
        - thresholds.BITS_ABOVE
        - math.log2(values[0]),
    )


def best_scale_bits(
    windows: dict[str, Window],
    costs: dict[str, float],
    possible: range = thresholds.SCALE_BITS,
) -> int:
    """Returns the power of two that suits the costliest set of layers.

    Of equally good ones that which suits the most layers, and of those that
    nearest to where Keras starts.

    Args:
        windows: Dict from the path of a layer to its `Window`.
        costs: Dict from a path to what the layer costs, nothing if it is not
            there.
        possible: Range of the powers of two to choose from.
    """

    def merit(bits):
        held = [path for path, own in windows.items() if own.holds(bits)]
        cost = sum(costs.get(path, 0) for path in held)
        return cost, len(held), -abs(bits - thresholds.USUAL_SCALE_BITS)

    return max(possible, key=merit)
