"""The course of training, and whether it has diverged since it began."""

import math
from typing import NamedTuple

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.numerics.arrays import largest_magnitude, to_array


class Course(NamedTuple):
    """Where training is.

    Attributes:
        loss: Float. The loss in float32.
        weight: Float. The largest magnitude among the weights.
        rate: Float. The learning rate, `None` if it is not known.
    """

    loss: float
    weight: float
    rate: float | None = None

    @classmethod
    def of(cls, model, loss: float, rate: float | None = None) -> "Course":
        """Returns where a model is that has this loss."""
        weights = (to_array(v.value) for v in model.trainable_variables)
        largest = max(map(largest_magnitude, weights), default=0.0)
        return cls(loss, largest, rate)

    def left(self, start: "Course") -> bool:
        """Returns whether training that began there has diverged.

        Args:
            start: `Course` of the same model before.
        """
        if math.isnan(start.loss):  # Only weights are known.
            return self.weight >= thresholds.DIVERGED * start.weight > 0
        if not (start.loss and math.isfinite(start.loss)):
            return False
        if not math.isfinite(self.loss):
            return True
        loss = abs(self.loss / start.loss)
        both = loss * max(self.weight / (start.weight or math.inf), 1.0) ** 2
        if self.loss < start.loss:
            return both >= thresholds.BOTH_DIVERGED_DOWNWARD
        if loss >= thresholds.LOSS_DIVERGED:
            return True
        return loss >= thresholds.WORSE and both >= thresholds.BOTH_DIVERGED
