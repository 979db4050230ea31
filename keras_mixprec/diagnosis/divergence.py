"""Whether training has left the numbers that it started from."""

from typing import NamedTuple

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.compare import largest
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.numerics.arrays import to_array


class Course(NamedTuple):
    """Where training is.

    Attributes:
        loss: Float. The loss in float32.
        weight: Float. The largest magnitude among the weights.
    """

    loss: float
    weight: float

    @classmethod
    def of(cls, model, loss: float) -> "Course":
        """Returns where a model is that has this loss."""
        weights = [to_array(v.value) for v in model.trainable_variables]
        return cls(loss, largest(weights))

    def left(self, start: "Course", step=None) -> Verdict | None:
        """Returns the verdict that training has diverged, `None` if not.

        Weights that have grown beyond measure overflow whatever there is, so
        that the layers seem to be at fault.

        Args:
            start: `Course` of the same model before.
            step: Int. For the verdict. Defaults to `None`.
        """
        numbers = {
            "loss_in_float32": self.loss,
            "loss_at_first": start.loss,
            "largest_weight": self.weight,
            "largest_weight_at_first": start.weight,
        }
        limit = thresholds.DIVERGED
        if (
            abs(self.loss) <= limit * abs(start.loss)
            or self.weight <= limit * start.weight
        ):
            return None
        kind = "divergence"
        return Verdict(kind, step=step, numbers=numbers, advice=advice(kind))
