"""What the optimizer reports about its steps."""

from collections.abc import Callable

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.formats import count_kinds
from keras_mixprec.loss_scaling.history import StepHistory
from keras_mixprec.loss_scaling.rules import LossScale, check_scale


class ReportsSteps:
    """Mixin: the loss scale and the record of the steps, for the host."""

    # Of the optimizer that this is mixed into.
    built: bool
    rule: LossScale
    history: StepHistory
    dynamic_scale: keras.Variable
    _scale_variable: keras.Variable
    _initial_scale: Callable[[], float]
    _check_built: Callable[[str], None]

    @property
    def loss_scale(self):
        """The loss scale in use now: a float32 scalar, `float()` of it works.

        Inside a compiled step, the value of that step.
        """
        self._may_scale()
        return self._scale_in_use()

    def _scale_in_use(self):
        # The first `apply` builds the optimizer, after the loss was scaled.
        if not self.built:
            return self._initial_scale()
        return active.step().value(self._scale_variable)

    @property
    def attempted_steps(self) -> int:
        """Steps taken or skipped; `iterations` counts those taken."""
        return self.step_counts()[0]

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since the optimizer was built."""
        return self.step_counts()[1]

    @property
    def consecutive_skipped_steps(self) -> int:
        """Steps skipped since the last one that was taken."""
        return self.step_counts()[2]

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.consecutive_skipped_steps > 0

    def overflow_counts(self) -> dict:
        """Returns, by variable path, in how many steps it overflowed."""
        return self.history.read_by_path("overflows") if self.built else {}

    def nonfinite_counts(self) -> dict:
        """Returns in how many steps a gradient held infinities or NaN.

        A dict with `"inf"`, `"-inf"` and `"nan"`; a step may count for several.
        """
        return self.history.read_kinds() if self.built else count_kinds()

    def gradient_norms(self) -> dict:
        """Returns, by variable path, the last step's unscaled gradient norm.

        Under `tf.distribute` it is the sum of the replicas' norms, an upper
        bound of the norm of their sum.
        """
        return self.history.read_by_path("gradient_norms") if self.built else {}

    def nonfinite_steps(self) -> list:
        """Returns the last 32 skipped steps, oldest first.

        Each has `.step` (its number among the attempted), `.scale`,
        `.variables` (paths of those that overflowed) and `.kinds`, a dict from
        these to which of `"inf"`, `"-inf"` and `"nan"` their gradients held.
        """
        return self.history.read_recent() if self.built else []

    def set_loss_scale(self, scale: float):
        """Continues with another loss scale.

        Args:
            scale: Float.

        Raises:
            TypeError: If it is not a number.
            ValueError: If it, or its reciprocal, is not a normal float32
                number, or the optimizer has not been built.
        """
        self._check_built("set_loss_scale")
        scale = check_scale("scale", scale)
        self.history.note_scale(float(self._scale_in_use()), scale)
        self._scale_variable.assign(scale)
        # Or a rule that publishes late would go back to what it decided on.
        self.history.pending_scale.assign(scale)

    def skipped_step_numbers(self):
        """Returns the numbers of skipped steps, rising.

        They count attempted steps from 1. Those among the last 1,024 steps that
        were skipped or changed the loss scale.
        """
        changes = self.history.read_changes() if self.built else []
        return np.array([c.step for c in changes if c.was_skipped], int)

    def step_counts(self) -> tuple:
        """Returns attempted, skipped and consecutive skipped steps."""
        return self.history.read_counts()[:3]
