"""Whether training bears a demotion, or was better off skipping the step."""

from typing import NamedTuple

import numpy as np

from keras_mixprec.backend.model_state import optimizers_of
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import largest, nonfinite
from keras_mixprec.numerics.arrays import to_array

# Weights are compared when the cooldown is over, and then after twice as many
# steps as the time before, up to so many steps after a demotion.
_STEPS = 500


class Growth(NamedTuple):
    """How far weights have grown since a demotion.

    Attributes:
        before: Float. The largest magnitude then.
        now: Float. The largest magnitude now, infinite if any is not finite.
    """

    before: float
    now: float

    @property
    def diverged(self) -> bool:
        """Whether no training needs as much in so few steps."""
        # Weights that start from zeros are larger after a step.
        return self.now > thresholds.DIVERGED * max(self.before, 1.0)


class Probation:
    """Compares a model with what it was when layers were demoted.

    An outlier that overflows float16 is skipped with its step; in float32 its
    gradient is finite and may throw the weights anywhere.

    Args:
        model: The `keras.Model`, with variables that are up to date.
        step: Int. The step of the demotion.
        gap: Int. Steps until weights are compared first.
        scale_bits: Float. The loss scale in use, as a power of two.

    Attributes:
        step: Int. As given.
        scale_bits: Float. As given.
        paths: Set of the paths of the layers that were demoted since.
    """

    def __init__(self, model, step: int, gap: int, scale_bits: float):
        self.step = step
        self.scale_bits = scale_bits
        self.paths = set()
        self._gap = max(gap, 1)
        self._before = _largest_weight(model)
        self._state = [(v, np.array(v)) for v in _trained(model)]

    def due(self, step: int) -> bool:
        """Whether it is time to compare."""
        return step >= self.step + self._gap

    def over(self) -> bool:
        """Whether what comes now has another cause."""
        return self._gap > _STEPS

    def growth(self, model) -> Growth:
        """Compares the weights; the next time is twice as far away.

        Args:
            model: The `keras.Model`, with variables that are up to date.
        """
        self._gap *= 2
        return Growth(self._before, _largest_weight(model))

    def restore(self):
        """Gives weights and optimizer state the values of the demotion."""
        for variable, value in self._state:
            variable.assign(value)


def _trained(model):
    """What steps write: weights and inner optimizers, no counters of ours."""
    found = list(model.weights)
    for optimizer in optimizers_of(model).values():
        found += getattr(optimizer, "inner_optimizer", optimizer).variables
    return found


def _largest_weight(model):
    weights = [to_array(v.value) for v in model.trainable_variables]
    return np.inf if nonfinite(weights) else largest(weights)
