"""The loss scale in use, and the loss scales that suit a layer's gradients."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.criterion import relative_error
from keras_mixprec.diagnosis.thresholds import SCALE_BITS
from keras_mixprec.formats import get_format
from keras_mixprec.loss_scaling.rules import FixedLossScale, ScheduledLossScale
from keras_mixprec.numerics.arrays import to_array


class ScaleInUse(NamedTuple):
    """The loss scale of a model.

    Attributes:
        bits: Float. The scale as a power of two.
        adapts: Boolean, whether the scale is dynamic.
        possible: Range of the powers of two that the scale can take.
        scales: Boolean, whether an optimizer scales the loss.
        steps_per_bit: Float. The number of finite steps until the scale has
            doubled. `None` if the scale does not grow by a factor.
        first_bits: Float. The initial scale, as a power of two.
    """

    bits: float
    adapts: bool
    possible: range
    scales: bool = True
    steps_per_bit: float | None = None
    first_bits: float = 0.0

    def steps_to(self, bits: float) -> int | None:
        """Returns the number of finite steps until the scale is `2**bits`."""
        if self.steps_per_bit is None:
            return None
        return round(max(bits - self.bits, 0.0) * self.steps_per_bit)


def scale_in_use(model: keras.Model) -> ScaleInUse:
    """Returns the loss scale of a model.

    Args:
        model: A compiled `keras.Model`. Without loss scaling its scale is
            `2**0`.
    """
    wrapper = keras.optimizers.LossScaleOptimizer
    found = optimizers_of(model).values()
    scaling = next((o for o in found if isinstance(o, wrapper)), None)
    rule = getattr(scaling, "rule", None)
    possible = _possible(rule)
    if scaling is None:
        return ScaleInUse(0.0, False, possible, scales=False)
    given = isinstance(rule, (FixedLossScale, ScheduledLossScale))
    scale = (
        to_array(scaling.dynamic_scale.value)
        if scaling.built
        else scaling.initial_scale
    )
    return ScaleInUse(
        float(np.log2(scale)),
        not given,
        possible,
        steps_per_bit=_steps_per_bit(scaling),
        first_bits=float(np.log2(scaling.initial_scale)),
    )


def _steps_per_bit(scaling):
    interval = scaling.dynamic_growth_steps
    # Keras' own loss scale optimizer has no `rule`, and doubles the scale.
    factor = getattr(getattr(scaling, "rule", None), "growth_factor", 2.0)
    return interval and interval / math.log2(factor)


def _possible(rule):
    lowest, highest = SCALE_BITS[0], SCALE_BITS[-1]
    floor, ceiling = (
        getattr(rule, name, None) for name in ("min_scale", "max_scale")
    )
    if floor:
        lowest = min(max(lowest, math.ceil(math.log2(floor))), highest)
    if ceiling:
        highest = max(min(highest, math.floor(math.log2(ceiling))), lowest)
    return range(lowest, highest + 1)


class ScaleWindow(NamedTuple):
    """The loss scales that suit a layer's gradients, as powers of two.

    Attributes:
        low: Float. At a lower scale, more than 1% of the gradients' energy
            underflows.
        high: Float. At a higher scale, the largest gradient is less than two
            bits below overflow.
    """

    low: float
    high: float

    def holds(self, bits: float) -> bool:
        """Returns whether a loss scale of `2**bits` lies in the window."""
        return self.low <= bits <= self.high


ANY_SCALE = ScaleWindow(-math.inf, math.inf)


def common_bits(
    windows: Iterable[ScaleWindow], numbers: Iterable[dict]
) -> dict:
    """Returns the lowest and the highest loss scale that suit all layers.

    Args:
        windows: `ScaleWindow`s.
        numbers: The `numbers` of culprits. If a culprit needs a different loss
            scale, they contain the ends of its window.

    Returns:
        Dict with `"lowest_bits"` and `"highest_bits"`, unless infinite. Empty
        if no power of two suits all layers.
    """
    ends = [
        ScaleWindow(n.get("lowest_bits", -math.inf), n["highest_bits"])
        for n in numbers
        if "highest_bits" in n
    ]
    lows, highs = zip(ANY_SCALE, *windows, *ends, strict=True)
    found = {"lowest_bits": max(lows), "highest_bits": min(highs)}
    if np.ceil(found["lowest_bits"]) > found["highest_bits"]:
        return {}
    return {k: bits for k, bits in found.items() if math.isfinite(bits)}


def scale_window(
    gradients: Sequence[np.ndarray], dtype: str = "float16"
) -> ScaleWindow:
    """Returns the loss scales that suit a layer's gradients.

    The method follows Zhao et al., 2019 (arXiv 1910.12385). Their adaptive
    loss scaling gives each layer a scale from the same two bounds.

    Args:
        gradients: Arrays, computed in float32 from the unscaled loss.
        dtype: String. The format that must hold the scaled gradients.
    """
    values = np.concatenate([np.abs(g).ravel() for g in gradients] or [[]])
    values = values[np.isfinite(values) & (values > 0)].astype("float32")
    if not values.size:
        return ANY_SCALE
    limits, largest = get_format(dtype), float(values.max())
    smallest = _smallest_that_counts(values)
    return ScaleWindow(
        math.log2(limits.smallest_subnormal)
        + thresholds.BITS_BELOW
        - math.log2(smallest),
        math.log2(limits.maximum) - thresholds.BITS_ABOVE - math.log2(largest),
    )


def lost(gradients: Sequence[np.ndarray], bits: float) -> bool:
    """Returns whether too large a share of gradients underflows in float16.

    Args:
        gradients: Arrays, computed in float32 from the unscaled loss.
        bits: Float. The loss scale, as a power of two.
    """
    scale = np.float32(2.0**bits)
    low = [(g * scale).astype("float16") / scale for g in gradients]
    return relative_error(low, gradients) > thresholds.VANISHED


def _smallest_that_counts(values):
    """Returns the power of two above which numbers hold the energy to keep."""
    exponents = np.frexp(values)[1]
    last = exponents.max()
    energies = np.bincount(last - exponents, np.square(values, dtype="float64"))
    kept = thresholds.KEPT_ENERGY * energies.sum()
    return 2.0 ** (last - 1 - np.searchsorted(energies.cumsum(), kept))


def best_scale_bits(
    windows: dict[str, ScaleWindow],
    costs: dict[str, float],
    possible: range = thresholds.SCALE_BITS,
) -> int:
    """Returns the power of two that suits layers with the largest total cost.

    A tie goes to the scale that suits more layers, and then to the scale
    nearest to Keras' initial one.

    Args:
        windows: Dict from the path of a layer to its `ScaleWindow`.
        costs: Dict from the path of a layer to its cost, 0 if missing.
        possible: Range of the powers of two to choose from.
    """

    def score(bits):
        held = [path for path, own in windows.items() if own.holds(bits)]
        cost = sum(costs.get(path, 0) for path in held)
        return cost, len(held), -abs(bits - thresholds.USUAL_SCALE_BITS)

    return max(possible, key=score)
