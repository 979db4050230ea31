"""Reading what an optimizer recorded since the last look."""

import math
from typing import NamedTuple

from keras_mixprec.loss_scaling.history import CAPACITY

# This many skipped steps in a row are no scale search any more: from 2**15
# that finds a scale of 2**10, and few models need a smaller one.
SUSPICIOUS_STEPS = 5


class Reading(NamedTuple):
    """What one look at an optimizer found.

    Attributes:
        loss_scale: Float. The scale in use now.
        grown: Boolean. Whether it is larger than at the last look.
        changed: Boolean. Whether it is another than at the last look, or this
            is the first.
        skipped: Int. Steps skipped so far.
        in_a_row: Int. Steps skipped since the last one applied.
        collapsed: Boolean. Whether the scale cannot fall any further and
            steps in a row are still skipped.
        new_steps: List of the `NonfiniteStep`s since the last look.
        unseen: Int. Non-finite steps since then that the optimizer counted
            but no longer remembers in full.
        overflow_counts: Dict path -> number of steps it overflowed in.
        gradient_norms: Dict path -> unscaled norm of the last step.
    """

    loss_scale: float
    grown: bool
    changed: bool
    skipped: int
    in_a_row: int
    collapsed: bool
    new_steps: list
    unseen: int
    overflow_counts: dict
    gradient_norms: dict

    def scalars(self, name: str = "", by_variable: bool = True) -> dict:
        """Returns the curves of this reading, tag -> number.

        Args:
            name: String. Which of several optimizers it is, `""` if there is
                one.
            by_variable: Boolean. Whether those of each variable as well.
        """
        where = f"/{name}" if name else ""
        norms = self.gradient_norms
        curves = {
            f"mixprec/loss_scale{where}": self.loss_scale,
            f"mixprec/log2_loss_scale{where}": math.log2(self.loss_scale),
            f"mixprec/skipped_steps{where}": self.skipped,
            f"mixprec/gradient_norm{where}": math.hypot(*norms.values()),
        }
        if not by_variable:
            return curves
        for path, norm in norms.items():
            curves[f"mixprec/gradient_norm_by_variable{where}/{path}"] = norm
        for path, count in self.overflow_counts.items():
            if count:
                curves[f"mixprec/overflow_count{where}/{path}"] = count
        return curves


class Watch:
    """Looks at one optimizer from time to time.

    Args:
        optimizer: A built `LossScaleOptimizer`.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.first_attempted = optimizer.attempted_steps
        self.first_skipped = self._seen = optimizer.skipped_steps
        self.first_scale = float(optimizer.loss_scale)
        self._scale = None
        self._first_counts = optimizer.overflow_counts()

    def read(self) -> Reading:
        """Returns what there is to tell, and what is new since the last."""
        optimizer = self.optimizer
        skipped = optimizer.skipped_steps
        new = skipped - self._seen
        self._seen = skipped
        known = min(new, CAPACITY)
        before, self._scale = self._scale, float(optimizer.loss_scale)
        in_a_row = optimizer.consecutive_skipped_steps
        return Reading(
            loss_scale=self._scale,
            grown=before is not None and self._scale > before,
            changed=self._scale != before,
            skipped=skipped,
            in_a_row=in_a_row,
            collapsed=in_a_row >= SUSPICIOUS_STEPS
            and self._scale <= self._floor(),
            new_steps=optimizer.nonfinite_steps()[-known:] if known else [],
            unseen=new - known,
            overflow_counts=optimizer.overflow_counts(),
            gradient_norms=optimizer.gradient_norms(),
        )

    def _floor(self):
        # A fixed or scheduled scale does not fall at all.
        return getattr(self.optimizer.rule, "min_scale", math.inf) or 0.0

    def attempted(self) -> int:
        """Returns the number of steps attempted since the start."""
        return self.optimizer.attempted_steps - self.first_attempted

    def skipped(self) -> int:
        """Returns the number of steps skipped since the start."""
        return self.optimizer.skipped_steps - self.first_skipped

    def overflow_counts(self) -> dict:
        """Returns, by path, in how many steps it overflowed since the start."""
        return {
            path: count - self._first_counts.get(path, 0)
            for path, count in self.optimizer.overflow_counts().items()
        }
