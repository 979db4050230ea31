"""State that a skipped step does not turn into NaN.

The optimizer skips a step that overflowed, but what layers write themselves in
the forward pass is written all the same: one such batch makes the moving mean
of a `BatchNormalization` NaN for ever.
"""

import functools

from keras import ops
from keras.src.backend import AutocastScope

from keras_mixprec.backend import step as backend_step
from keras_mixprec.callbacks.replacements import Replacements


def guard_state(model, in_steps: Replacements):
    """Keeps finite numbers in a model's state from becoming non-finite.

    Element by element, so that those of other channels are updated. Finite
    updates are written as they are.

    Args:
        model: A built `keras.Model`.
        in_steps: What is replaced during training steps.
    """
    for variable in model.non_trainable_variables:
        if "float" in variable.dtype and (variable, "assign") not in in_steps:
            in_steps.add(variable, "assign", _keeping_finite(variable))


def _keeping_finite(variable):
    assign = variable.assign

    @functools.wraps(assign)
    def guarded(value):
        value = ops.convert_to_tensor(value, dtype=variable.dtype)
        if backend_step.current().known_finite(value):
            return assign(value)
        # As stored, not as a 16-bit layer would see it.
        with AutocastScope(None):
            old = ops.convert_to_tensor(variable.value)
        lost = ops.logical_and(
            ops.logical_not(ops.isfinite(value)), ops.isfinite(old)
        )
        return assign(ops.where(lost, old, value))

    return guarded
