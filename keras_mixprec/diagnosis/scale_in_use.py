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
    """

    bits: float
    adapts: bool
    possible: range


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
        return ScaleInUse(0.0, False, possible)
    given = isinstance(rule, (FixedLossScale, ScheduledLossScale))
    scale = (
        to_array(scaling.dynamic_scale.value)
        if scaling.built
        else scaling.initial_scale
    )
    return ScaleInUse(float(np.log2(scale)), not given, possible)


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
