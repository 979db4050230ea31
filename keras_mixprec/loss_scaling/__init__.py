"""Loss scaling: update rules (pure), gradient health, the optimizer."""

from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.ensure import ensure_loss_scaling
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.scheduled import (
    FixedLossScale,
    ScheduledLossScale,
)

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScaleOptimizer",
    "ScheduledLossScale",
    "ensure_loss_scaling",
]
