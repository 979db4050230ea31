"""Whether a loss is wrong, and not just unsettled."""

import math
from collections.abc import Callable

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.numerics.dry_step import compiled_loss
from keras_mixprec.numerics.dtypes import computing_in, with_sublayers
from keras_mixprec.numerics.jitter import jittered


def loss_error(loss: float, exact: float) -> float:
    """Returns the share by which a loss is off, infinite if it is no number."""
    if not math.isfinite(loss):
        return math.inf
    return abs(loss - exact) / max(abs(exact), 1e-30)


class LossCheck:
    """Compares 16-bit losses with float32 ones of several like models.

    The loss of a chaotic model, such as a deep one that normalizes over a
    batch of four, is off by 10% if any rounding is different. So each
    comparison is repeated with weights that are off by half a float16 ulp.

    Args:
        model: A built `keras.Model`.
        low: Function of a list of layers: the loss with those in float32.
        exact: Function without arguments: the loss in float32.
    """

    def __init__(
        self,
        model,
        low: Callable[[list], float],
        exact: Callable[[], float],
    ):
        self._model = model
        self._low = low
        self._exact = exact

    def wrong(self, demoted: list) -> bool:
        """Whether the loss is wrong however the weights are rounded."""
        return all(e > thresholds.LOSS_ERROR for e in self._errors(demoted))

    def right(self, demoted: list) -> bool:
        """Whether the loss is right however the weights are rounded."""
        return all(e <= thresholds.LOSS_ERROR for e in self._errors(demoted))

    def _errors(self, demoted):
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                yield loss_error(self._low(demoted), self._exact())


def right_in_xla(model, data) -> bool:
    """Whether the loss of a step is right when XLA compiles it.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
    """
    low = compiled_loss(model, data)
    # It may draw other random numbers than single operations do.
    with computing_in("float32", with_sublayers(model)):
        exact = compiled_loss(model, data)
    return loss_error(low, exact) <= thresholds.LOSS_ERROR
