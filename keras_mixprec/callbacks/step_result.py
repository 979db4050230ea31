"""What a train step has returned and left."""

import keras
from keras import ops


def step_result(model: keras.Model, returned) -> "StepResult":
    """Returns the `StepResult` of what `model.train_step` has returned."""
    if keras.backend.backend() == "jax":
        return _FunctionalStepResult(model, returned)
    return StepResult(model, returned)


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

    def replaced(self, logs, variable, value):
        """Returns what the step returns with other logs.

        Args:
            logs: They take the place of those that it returned.
            variable: A variable that gets another value.
            value: Tensor.
        """
        variable.assign(value)
        return logs


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

    def replaced(self, logs, variable, value):
        *state, metrics = self._state
        known = self._model.metrics_variables
        metrics = [
            value if other is variable else old
            for other, old in zip(known, metrics, strict=True)
        ]
        return logs, (*state, metrics)


def _is_float(variable):
    return "float" in variable.dtype
