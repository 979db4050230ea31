"""The state of a model before and after a step, and keeping that finite.

The optimizer skips a step that overflowed, but what metrics and layers write
themselves is written all the same: one such batch makes the moving mean of a
`BatchNormalization` NaN for ever.
"""

import contextlib
import functools

import keras
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.keras_internals import AutocastScope
from keras_mixprec.loss_scaling.current_step import loss_kinds


def step_state(model: keras.Model, arguments: tuple) -> "StepState":
    """Returns the `StepState` of a step that is about to be taken.

    Args:
        model: The `keras.Model`.
        arguments: Those of `train_step`; JAX passes the state first.
    """
    if keras.backend.backend() == "jax":
        return _FunctionalStepState(model, arguments[0])
    return StepState(model)


class StepState:
    """The variables of a model before a step and after it, and its logs.

    Attributes:
        logs: As the step returned them; may be changed if it is a dict.
    """

    def __init__(self, model):
        self.logs = None
        self._model = model
        # Copies, since torch writes into the variables' own memory.
        self._before = {
            id(v): ops.copy(v.value) for v in model.metrics_variables
        }

    def weights(self) -> list:
        """Returns the float tensors that the step computes with."""
        values = [ops.convert_to_tensor(v.value) for v in self._model.variables]
        return [value for value in values if _is_float(value)]

    def finish(self, returned):
        """The step is over, and has returned this."""
        self.logs = returned

    def state(self) -> contextlib.AbstractContextManager:
        """Context in which variables have the values after the step."""
        return contextlib.nullcontext()

    def value(self, variable):
        """Returns a variable's value, `None` if the step has not got it."""
        return ops.convert_to_tensor(variable.value)

    def assign(self, variable, value):
        """Gives a variable another value.

        Args:
            variable: A variable of the model, its optimizer or its metrics.
            value: Tensor.
        """
        variable.assign(value)

    def restore(self, bad):
        """Gives metrics the state of before the step, if it was bad.

        Args:
            bad: Boolean tensor.
        """
        for variable in self._model.metrics_variables:
            # Some metrics make theirs only in the step, of zeros.
            old = self._before.get(id(variable), 0)
            new = self.value(variable)
            self.assign(variable, ops.where(bad, ops.cast(old, new.dtype), new))

    def remember_loss(self, histories: list):
        """Adds to the optimizers' records what the loss was.

        Where it was not known when the step was recorded.

        Args:
            histories: List of the `StepHistory`s of the optimizers.
        """

    def returned(self):
        """Returns what the step returns, with what has changed."""
        return self.logs


class _FunctionalStepState(StepState):
    """The same on JAX, where a step is a function of the state."""

    def __init__(self, model, state):
        self.logs = None
        self._model = model
        self._lists = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        self._before = self._after = self._by_id(state)
        self._weights = [*state[0], *state[1]]

    def _by_id(self, state):
        return {
            id(variable): value
            for variables, values in zip(self._lists, state, strict=True)
            for variable, value in zip(variables, values, strict=True)
        }

    def weights(self):
        return [value for value in self._weights if _is_float(value)]

    def finish(self, returned):
        self.logs, state = returned
        self._after = self._by_id(state)

    def state(self):
        mapping = [(v, self._after[id(v)]) for v in self._lists[-1]]
        return keras.StatelessScope(state_mapping=mapping)

    def value(self, variable):
        return self._after.get(id(variable))

    def assign(self, variable, value):
        self._after[id(variable)] = value

    def remember_loss(self, histories):
        for history in histories:
            rows = history.remember_loss(
                self.value(history.counts),
                self.value(history.recent_inputs),
                loss_kinds(),
            )
            self.assign(history.recent_inputs, rows)

    def returned(self):
        state = ([self._after[id(v)] for v in own] for own in self._lists)
        return self.logs, tuple(state)


def _is_float(value):
    return "float" in keras.backend.standardize_dtype(value.dtype)


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
        if active.step().known_finite(value):
            return assign(value)
        # As stored, not as a 16-bit layer would see it.
        with AutocastScope(None):
            old = ops.convert_to_tensor(variable.value)
        lost = ops.logical_and(
            ops.logical_not(ops.isfinite(value)), ops.isfinite(old)
        )
        return assign(ops.where(lost, old, value))

    return guarded
