"""The loss scale that a model trains with."""

import math
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend.model_state import optimizers_of
from keras_mixprec.diagnosis.thresholds import SCALE_BITS
from keras_mixprec.loss_scaling import FixedLossScale, ScheduledLossScale
from keras_mixprec.numerics.arrays import to_array


class ScaleInUse(NamedTuple):
    """The loss scale of a model.

    Attributes:
        bits: Float. The scale as a power of two.
        adapts: Boolean. Whether it adapts itself to the gradients.
        possible: Range of the powers of two that it could take.
        scales: Boolean. Whether anything scales the loss.
        steps_per_bit: Float. Finite steps that it takes to double, `None` if
            it does not grow by a factor.
    """

    bits: float
    adapts: bool
    possible: range
    scales: bool = True
    steps_per_bit: float | None = None

    def steps_to(self, bits: float) -> int | None:
        """Returns how many finite steps it takes to grow to `2**bits`."""
        if self.steps_per_bit is None:
            return None
        return round(max(bits - self.bits, 0.0) * self.steps_per_bit)


def scale_in_use(model: keras.Model) -> ScaleInUse:
    """Returns the loss scale of a model.

    Args:
        model: A compiled `keras.Model`. One without loss scaling has `2**0`.
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
    )


def _steps_per_bit(scaling):
    interval = scaling.dynamic_growth_steps
    # Keras' own optimizer has no rule, and doubles.
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
