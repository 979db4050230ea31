"""Loss scales that do not depend on the gradients."""

import sys

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import check_integer
from keras_mixprec.loss_scaling.rules import (
    LossScale,
    LossScaleState,
    check_scale,
    namespace,
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

    def update(self, state: LossScaleState, finite) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        return _step_with(state, state.scale, finite)

    def unchanged_for(self, state: LossScaleState, finite: bool) -> int:
        """See `LossScale.unchanged_for`."""
        return sys.maxsize if finite or not state.good_steps else 0

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

    def __init__(self, schedule):
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

    def scale_at(self, step):
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

    def update(self, state: LossScaleState, finite) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        return _step_with(state, self.scale_at(state.steps + 1), finite)

    def unchanged_for(self, state: LossScaleState, finite: bool) -> int:
        """See `LossScale.unchanged_for`."""
        table = isinstance(self.schedule, dict)
        if not table or state.scale != self.scale_at(state.steps):
            return 0
        if not finite and state.good_steps:
            return 0
        later = [start for start in self.schedule if start > state.steps]
        return min(later, default=sys.maxsize) - int(state.steps) - 1

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
    def from_config(cls, config):
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
