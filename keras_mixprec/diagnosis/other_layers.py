"""Layers that a step calls in 16 bits and that the model does not hold.

Such as the feature network of a loss, or a layer that is a global of a script:
no plan names them, and `model.dtype_policy` says nothing of them.
"""

import keras

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.step_errors import evidence
from keras_mixprec.diagnosis.whole_step import WholeStep, fault_of_errors


def other_layers_at_fault(
    whole: WholeStep, others: list, demoted: list, bits: float, adapts: bool
) -> Culprit | None:
    """Returns what is wrong with a step in which they compute in 16 bits.

    Args:
        whole: `WholeStep`.
        others: List of such layers and losses. In float32 the step is right.
        demoted: As for `WholeStep.step`.
        bits: As for `WholeStep.step`.
        adapts: Boolean. Whether the loss scale adapts itself.
    """
    numbers = _what(others[0])
    try:
        step = whole.step(demoted, bits)
        if not whole.wrong(step, demoted, bits):
            return None
        if adapts and whole.other_scale(demoted, bits) is not None:
            return None
        errors = whole.errors(demoted, bits)
    except active.replay().REFUSALS as error:
        numbers |= evidence(error)
        return Culprit(None, [], "unsupported", None, numbers)
    numbers |= {"loss_error": errors.loss, "gradient_error": errors.gradient}
    return Culprit(None, [], *fault_of_errors(errors), numbers)


def _what(other):
    if isinstance(other, keras.losses.Loss):
        return {"narrow_loss": other.name, "dtype": other.dtype}
    return {"not_held": other.name, "dtype": other.compute_dtype}
