"""The loss scale that a model trains with."""

import keras
import numpy as np

from keras_mixprec.loss_scaling import FixedLossScale, ScheduledLossScale
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import optimizers_of


def scale_in_use(model: keras.Model) -> tuple[float, bool]:
    """Returns the loss scale as a power of two, and whether it adapts itself.

    Args:
        model: A compiled `keras.Model`. One without loss scaling has `2**0`.
    """
    wrapper = keras.optimizers.LossScaleOptimizer
    found = optimizers_of(model).values()
    scaling = next((o for o in found if isinstance(o, wrapper)), None)
    if scaling is None:
        return 0.0, False
    rule = getattr(scaling, "rule", None)
    given = isinstance(rule, (FixedLossScale, ScheduledLossScale))
    if not scaling.built:
        return float(np.log2(scaling.initial_scale)), not given
    scale = to_array(scaling.dynamic_scale.value)
    return float(np.log2(scale)), not given
