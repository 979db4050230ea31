"""Layers that a step calls in 16 bits and that the model does not hold.

Such as the feature network of a loss, or a layer that is a global of a script:
no plan names them, and `model.dtype_policy` says nothing of them.
"""

import keras

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.step_errors import evidence
from keras_mixprec.diagnosis.step_run import StepRun


def other_layers_at_fault(
    run: StepRun, others: list, adapts: bool
) -> Culprit | None:
    """Returns the fault of a step in which these layers compute in 16 bits.

    Args:
        run: `StepRun`, with all layers of the model demoted that need be.
        others: List of such layers and losses. In float32 the step is right.
        adapts: Boolean, whether the loss scale adapts itself.
    """
    numbers = _what(others[0])
    try:
        if not run.wrong(run.step()) or (adapts and run.find_other_scale()):
            return None
    except active.replay().REFUSALS as error:
        numbers |= evidence(error)
        return Culprit(None, [], "unsupported", None, numbers)
    return run.fault([]).of(None, [], numbers | run.numbers())


def _what(other):
    if isinstance(other, keras.losses.Loss):
        return {"narrow_loss": other.name, "dtype": other.dtype}
    return {"not_held": other.name, "dtype": other.compute_dtype}
