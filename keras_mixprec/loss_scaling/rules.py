"""Update rules of the loss scale: state in, state out.

A rule owns numbers, never variables. `update` takes the state that a step ran
with and whether its gradients were finite, and returns the state for the next
step. It is elementwise, so a batch of states is as good as one, and it works
on NumPy values as well as inside a compiled train step on any backend.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import check_integer, check_number

# A scale and its reciprocal both have to be normal float32 numbers, or a
# backend that flushes subnormals unscales every gradient to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

_NORMAL = "the scale and its reciprocal must be normal float32 numbers"


class LossScaleState(NamedTuple):
    """What an update rule remembers between two steps.

    Attributes:
        scale: float32. The loss scale the next step runs with.
        good_steps: int. Finite steps since the scale last changed or a step
            was last skipped. DeepSpeed's rule starts it at -1.
        hysteresis_left: int >= 1. Non-finite steps until the next backoff.
        pending_scale: float32. The scale that a rule which publishes one step
            late (MXNet) has decided on; equal to `scale` in all others.
        steps: int. Steps attempted, skipped ones included.
    """

    scale: Any
    good_steps: Any
    hysteresis_left: Any
    pending_scale: Any
    steps: Any


class LossScale:
    """Base of the update rules."""

    # The scale of the first step, of each rule.
    _initial_scale: Callable[[], float]

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, as NumPy scalars."""
        scale = np.float32(self._initial_scale())
        start, left = self._initial_counts()
        return LossScaleState(
            scale, np.int32(start), np.int32(left), scale, np.int32(0)
        )

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step.

        Args:
            state: The `LossScaleState` the step ran with.
            finite: Boolean, scalar or of the state's shape. Whether every
                gradient of the step was finite on every replica.

        Returns:
            A new `LossScaleState`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `update(state, finite)`."
        )

    def next_state(self, state: LossScaleState, finite) -> LossScaleState:
        """Returns the state after a step of an optimizer.

        That of `update`, with the scale held where scaling can be undone.
        """
        after = self.update(state, finite)
        return after._replace(scale=safe_scale(after.scale, state.scale))

    def _initial_counts(self):
        return 0, 1

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Creates the rule from what `get_config` returned."""
        return cls(**config)

    def __eq__(self, other):
        return (
            type(self) is type(other)
            and self.get_config() == other.get_config()
        )

    def __hash__(self):
        return hash((type(self), repr(self.get_config())))

    def __repr__(self):
        arguments = [f"{k}={v!r}" for k, v in self.get_config().items()]
        return f"{type(self).__name__}({', '.join(arguments)})"


def namespace(value):
    """NumPy for host values, `keras.ops` for tensors and variables."""
    host = isinstance(value, (np.generic, np.ndarray, int, float))
    return np if host else ops


def safe_scale(scale, previous):
    """Holds a scale within the range in which scaling can be undone."""
    xp = namespace(previous)
    scale = xp.where(xp.isnan(scale), previous, scale)
    return xp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)


def check_scale(name, value, optional=False):
    """Returns a scale as a float, or raises; `None` passes if optional."""
    if optional and value is None:
        return None
    return check_number(
        name, value, low=SMALLEST_SCALE, high=LARGEST_SCALE, why=_NORMAL
    )


@keras.saving.register_keras_serializable("keras_mixprec")
class FixedLossScale(LossScale):
    """Keeps one scale; non-finite steps are skipped and nothing else changes.

    Args:
        scale: Float, dimensionless, between `2.0**-126` and `2.0**126`.
            A power of two makes scaling exact.

    Raises:
        TypeError: If `scale` is not a number.
        ValueError: If it is outside its range.

    Example:
    >>> rule = FixedLossScale(1024.0)
    >>> float(rule.update(rule.initial_state(), finite=False).scale)
    1024.0
    """

    def __init__(self, scale: float):
        self.scale = check_scale("scale", scale)

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        return _step_with(state, state.scale, finite)

    def _initial_scale(self):
        return self.scale

    def get_config(self) -> dict:
        """Returns the arguments."""
        return {"scale": self.scale}


@keras.saving.register_keras_serializable("keras_mixprec")
class ScheduledLossScale(LossScale):
    """Takes the scale from a schedule over attempted steps.

    Attempted steps, not `optimizer.iterations`: those stand still on a
    skipped step, and a scale that overflows would then stay for ever.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, or a
            table `{step: scale}` in which each scale holds from its step on.
            A table needs a scale for step 0.

    Raises:
        TypeError: If `schedule` is neither.
        ValueError: If a table is empty, has no step 0, or holds a step or a
            scale that makes no sense.

    Example:
    >>> rule = ScheduledLossScale({0: 128.0, 2: 1024.0})
    >>> state = rule.initial_state()
    >>> for _ in range(3):
    ...     print(float(state.scale))
    ...     state = rule.update(state, finite=True)
    128.0
    128.0
    1024.0
    """

    def __init__(self, schedule: Any):
        if isinstance(schedule, dict):
            schedule = _check_table(schedule)
        elif not isinstance(
            schedule, keras.optimizers.schedules.LearningRateSchedule
        ):
            raise TypeError(
                "`schedule` must be a "
                "`keras.optimizers.schedules.LearningRateSchedule` or a dict "
                f"of step -> scale. Received: schedule={schedule!r} of type "
                f"{type(schedule).__name__}"
            )
        self.schedule = schedule
        # Now, so that a bad start is refused here, and because a schedule
        # has no value on the host while a step is being compiled.
        self._first = check_scale("schedule(0)", self.scale_at(np.int32(0)))

    def scale_at(self, step: Any) -> Any:
        """Returns the scale of attempted step `step`, counted from 0."""
        if not isinstance(self.schedule, dict):
            scale = self.schedule(step)
            if namespace(step) is np:
                return np.float32(float(scale))
            return ops.cast(scale, "float32")
        xp = namespace(step)
        scale = xp.zeros_like(step, dtype="float32")
        for start, value in self.schedule.items():
            scale = xp.where(step >= start, np.float32(value), scale)
        return scale

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        return _step_with(state, self.scale_at(state.steps + 1), finite)

    def _initial_scale(self):
        return self._first

    def get_config(self) -> dict:
        """Returns the arguments."""
        if isinstance(self.schedule, dict):
            # JSON has no integer keys.
            table = {str(k): v for k, v in self.schedule.items()}
            return {"schedule": table}
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Creates the rule from what `get_config` returned."""
        schedule = config["schedule"]
        if "class_name" in schedule:
            return cls(keras.saving.deserialize_keras_object(schedule))
        return cls({int(k): v for k, v in schedule.items()})


def _step_with(state, scale, finite):
    """The state after a step whose scale does not depend on its gradients."""
    xp = namespace(state.scale)
    good_steps = xp.where(finite, state.good_steps + 1, 0)
    return LossScaleState(
        scale, good_steps, state.hysteresis_left, scale, state.steps + 1
    )


def _check_table(table):
    table = {
        check_integer("schedule step", step): check_scale(
            f"schedule[{step!r}]", scale
        )
        for step, scale in table.items()
    }
    if 0 not in table:
        raise ValueError(
            "A `schedule` table needs a scale for step 0. "
            f"Received: schedule={table}"
        )
    return dict(sorted(table.items()))
