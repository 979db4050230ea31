"""Update rules of the loss scale: state in, state out.

A rule owns numbers, never variables. `update` takes the state that a step ran
with and whether its gradients were finite, and returns the state for the next
step. It is elementwise, so a batch of states is as good as one, and it works
on NumPy values as well as inside a compiled train step on any backend.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_mixprec._checks import check_number

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

    def update(self, state: LossScaleState, finite) -> LossScaleState:
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

    def unchanged_for(self, state: LossScaleState, finite: bool) -> int:
        """Returns how many steps change nothing but the counts of steps.

        A lower bound; lets `replay` pass over such stretches at once.

        Args:
            state: A `LossScaleState` of NumPy scalars.
            finite: Boolean. Whether those steps are finite.
        """
        return 0

    def _initial_counts(self):
        return 0, 1

    @classmethod
    def from_config(cls, config):
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
