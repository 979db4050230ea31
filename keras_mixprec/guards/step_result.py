"""What a train step has returned and left, and keeping that finite.

The optimizer skips a step that overflowed, but what layers write themselves in
the forward pass is written all the same: one such batch makes the moving mean
of a `BatchNormalization` NaN for ever.
"""

import functools

import keras
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.keras_internals import AutocastScope
from keras_mixprec.loss_scaling.current_step import loss_kinds


def step_result(model: keras.Model, returned) -> "StepResult":
    """Returns the `StepResult` of what `model.train_step` has returned."""
    if keras.backend.backend() == "jax":
        return _FunctionalStepResult(model, returned)
    return StepResult(model, returned)


def incoming_weights(model: keras.Model, arguments: tuple) -> list:
    """Returns the float tensors that a step is about to compute with.

    Args:
        model: The `keras.Model`.
        arguments: Those of `train_step`; JAX passes the state first.
    """
    if keras.backend.backend() == "jax":
        trainable, non_trainable, *_ = arguments[0]
        values = [*trainable, *non_trainable]
    else:
        values = [ops.convert_to_tensor(v.value) for v in model.variables]
    return [v for v in values if _is_float(v)]


class StepResult:
    """The logs of a step, and variables as it left them.

    Attributes:
        logs: As the step returned them.
    """

    def __init__(self, model, returned):
        self.logs = returned
        self._model = model

    def weights(self) -> list:
        """Returns the float tensors that the model computes with."""
        return [self.value(v) for v in self._model.variables if _is_float(v)]

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

    def remember_loss(self, optimizers: list):
        """Adds to their records what the loss was, where it is not there.

        Args:
            optimizers: List of the `LossScaleOptimizer`s of the step.
        """

    def returned(self):
        """Returns what the step returns, with what has changed."""
        return self.logs


class _FunctionalStepResult(StepResult):
    def __init__(self, model, returned):
        logs, self._state = returned
        super().__init__(model, logs)

    def _variables(self):
        model = self._model
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )

    def weights(self):
        pairs = [
            pair
            for variables, values in zip(
                self._variables()[:2], self._state[:2], strict=True
            )
            for pair in zip(variables, values, strict=True)
        ]
        return [value for variable, value in pairs if _is_float(variable)]

    def value(self, variable):
        for variables, values in zip(
            self._variables(), self._state, strict=True
        ):
            for other, value in zip(variables, values, strict=True):
                if other is variable:
                    return value
        return None

    def assign(self, variable, value):
        self._state = tuple(
            [
                value if other is variable else old
                for other, old in zip(variables, values, strict=True)
            ]
            for variables, values in zip(
                self._variables(), self._state, strict=True
            )
        )

    def remember_loss(self, optimizers):
        for history in (optimizer.history for optimizer in optimizers):
            counts = self.value(history.counts)
            if counts is not None:
                rows = self.value(history.recent_inputs)
                rows = history.remember_loss(counts, rows, loss_kinds())
                self.assign(history.recent_inputs, rows)

    def returned(self):
        return self.logs, self._state


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
