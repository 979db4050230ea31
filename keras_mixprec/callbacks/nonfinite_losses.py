"""Counting the losses that are not finite, within the train step."""

import numpy as np
from keras import ops

from keras_mixprec.backend import step as backend_step
from keras_mixprec.callbacks.lent_variables import LentVariables
from keras_mixprec.nonfinite_kinds import count_kinds

# Added to a loss, the sum is NaN: if the loss is NaN, NaN or inf, NaN or -inf.
_PROBES = np.array([0, -np.inf, np.inf], "float32")


class NonfiniteLosses:
    """Counts batches with a loss that is not finite, by its kind.

    Args:
        variables: `LentVariables`, where the counters are created.
        tracker: The `keras.metrics.Mean` of the model's losses.
        earlier: Dict from each kind to what was counted before.

    Attributes:
        tracker: As given.
        variable: The counter.
    """

    def __init__(self, variables: LentVariables, tracker, earlier: dict):
        self.tracker = tracker
        self._earlier = earlier
        # The tracker is a `Mean`, which resets its own two variables only.
        self.variable, self._before = (
            variables.add(tracker, name, _PROBES.shape)
            for name in ("nonfinite_losses", "nonfinite_losses_before")
        )

    def add(self, loss):
        """Counts a loss, unless it is finite.

        Args:
            loss: Tensor.
        """
        total = loss if loss.shape == () else ops.sum(loss)
        kinds = ops.isnan(ops.add(total, _PROBES))
        self.variable.assign_add(ops.cast(kinds, "float32"))

    def count_from_here(self):
        """Starts a new epoch for `any`."""
        # A copy: JAX gives each buffer away once.
        self._before.assign(ops.copy(self.variable.value))

    def any(self):
        """Whether any was counted in this epoch, a boolean tensor."""
        return ops.any(ops.greater(self.variable, self._before))

    def read(self) -> dict:
        """Returns how many there were of each kind, on this process."""
        read = backend_step.current().read_sum(self.variable)
        nan, nan_or_inf, nan_or_minus_inf = read
        now = count_kinds((nan_or_inf - nan, nan_or_minus_inf - nan, nan))
        return {kind: n + now[kind] for kind, n in self._earlier.items()}
