"""Reads the steps that an optimizer has recorded since the last reading.

The log counts steps from 1 and batches from 0, as Keras does. The loss scale
logged at step `s` is in use after `s` steps, so batch `s` runs with this scale.
A skipped step `s` (the `at_step` of its event) ran with the scale logged at
step `s - 1`, and its new scale is logged at step `s`.
"""

import itertools
import math
from typing import NamedTuple

from keras_mixprec.reporting.schema import (
    NORMS_BY_VARIABLE,
    OVERFLOWS_BY_VARIABLE,
    SKIPPED_TAG,
    curve_tag,
)

# A search for the loss scale rarely skips five steps in a row. Five skipped
# steps lower a scale of 2**15 to 2**10, and few models need a smaller scale.
TRIGGER_STEPS = 5

# A loss scale without a floor counts as collapsed at the default floor of
# `DynamicLossScale()`, which is float16's smallest normal number. A gradient
# that still overflows at this scale is above 1e9. Other libraries stop earlier:
# fairseq raises an error below 1e-4, and DeepSpeed, Megatron and jmp keep the
# scale at 1 or more.
_LEAST_USEFUL = 2.0**-14

# The maximum number of loss scale changes in the log, at 0.1 kB each. A
# schedule may change the scale in every step of a long run.
_CHANGES = 20_000


class ScalePoint(NamedTuple):
    """A point on the curve of a loss scale, valid until the next point.

    Attributes:
        step: Int. Step of the log.
        scale: Float. The scale in use after this step.
        skipped: Int. The number of steps skipped so far.
        applied: Int. The number of steps applied so far.
    """

    step: int
    scale: float
    skipped: int
    applied: int


def scale_curves(scale: float, name: str) -> dict:
    """Returns the values of the loss scale curves at one step, by tag.

    Args:
        scale: Float.
        name: As for `Reading.curves`.
    """
    # Keras' own optimizer may lower its loss scale to 0, which has no
    # logarithm.
    log2 = math.log2(scale) if scale else -math.inf
    return {
        curve_tag("mixprec/loss_scale", name): scale,
        curve_tag("mixprec/log2_loss_scale", name): log2,
    }


class Reading(NamedTuple):
    """The result of one reading of an optimizer's counters.

    Attributes:
        points: List of `ScalePoint`s: the last point of the previous
            reading, all changes of the scale since then, and the current scale.
        gaps: List of pairs of steps between which some changes of the scale are
            unknown.
        skipped: Int. Steps skipped so far, in the whole log.
        in_a_row: Int. Steps skipped since the last applied step.
        collapsed: Boolean, whether steps are still skipped although the loss
            scale is at its floor.
        new_steps: List of the `NonfiniteStep`s since the last reading, with
            the step numbers of the log.
        others: List of further skipped steps since the last reading, which the
            optimizer has not recorded in full. Each entry is a triple: the
            first possible step, the last possible step, and the number of
            skipped steps.
        overflow_counts: Dict from variable path to the number of steps in
            which its gradient overflowed.
        gradient_norms: Dict from variable path to the unscaled gradient norm
            in the last step.
        first: Int. The first step that has no point in the log yet.
    """

    points: list
    gaps: list
    skipped: int
    in_a_row: int
    collapsed: bool
    new_steps: list
    others: list
    overflow_counts: dict
    gradient_norms: dict
    first: int

    @property
    def step(self) -> int:
        """The step of the log at this reading."""
        return self.points[-1].step

    @property
    def loss_scale(self) -> float:
        """The scale in use now."""
        return self.points[-1].scale

    @property
    def grown(self) -> bool:
        """Returns whether the scale has risen since the last reading."""
        scales = [point.scale for point in self.points]
        return any(b > a for a, b in itertools.pairwise(scales))

    @property
    def is_trouble(self) -> bool:
        """Returns whether a search for the scale does not explain the skips.

        A search explains neither many skipped steps in a row nor skipped steps
        that lower the scale below 1. A gradient that overflows at a scale of 1
        is out of float16's range.
        """
        is_low = self.skipped >= TRIGGER_STEPS and self.loss_scale < 1
        return self.in_a_row >= TRIGGER_STEPS or is_low

    def continued(self, again: "Reading") -> "Reading":
        """Returns this reading, merged with a second one at the same step.

        Args:
            again: `Reading` made after the scale was set.
        """
        points = self.points + again.points[1:]
        return self._replace(points=points, collapsed=again.collapsed)

    def curves(self, name: str = "", by_variable: bool = True) -> dict:
        """Returns the points of all curves, as nested dicts by step and tag.

        Args:
            name: String. The attribute name of the optimizer, `""` for a
                single optimizer.
            by_variable: Boolean, whether to include the curves of variables.
        """
        corners = self._corners()
        curves = {step: scale_curves(scale, name) for step, scale in corners}
        norms = self.gradient_norms
        now = curves.setdefault(self.step, {})
        now[curve_tag(SKIPPED_TAG, name)] = self.skipped
        norm = math.hypot(*norms.values())
        now[curve_tag("mixprec/gradient_norm", name)] = norm
        if not by_variable:
            return curves
        tag = curve_tag(NORMS_BY_VARIABLE, name)
        now |= {f"{tag}/{path}": norm for path, norm in norms.items()}
        tag = curve_tag(OVERFLOWS_BY_VARIABLE, name)
        counts = self.overflow_counts
        now |= {f"{tag}/{path}": n for path, n in counts.items() if n}
        return curves

    def _corners(self):
        """Returns step and scale before and after each change of the scale.

        TensorBoard draws straight lines between points, so a sudden change
        needs both.
        """
        start, *others = self.points
        if not others:
            own = start.step >= self.first
            return [(start.step, start.scale)] if own else []
        corners, scale = {}, start.scale
        # At the step of the first point, the log may already hold a different
        # loss scale, from an earlier `fit` or from before the user set the
        # scale. Start the curve one step later.
        if start.step < self.first or others[0].step == start.step:
            scale = [p for p in self.points if p.step == start.step][-1].scale
            corners[start.step + 1] = scale
        for point in others:
            if point.scale != scale:
                corners.setdefault(point.step - 1, scale)
            corners[point.step] = scale = point.scale
        return sorted(c for c in corners.items() if c[0] > start.step)


class Counts(NamedTuple):
    """The counters of an optimizer at one moment.

    Attributes:
        attempted: Int. Steps applied or skipped.
        skipped: Int. Steps skipped.
        in_a_row: Int. Steps skipped since the last applied step.
        changed: Int. The number of recorded `ScaleChange`s.
        scale: Float. The loss scale.
    """

    attempted: int
    skipped: int
    in_a_row: int
    changed: int
    scale: float

    @classmethod
    def of(cls, optimizer) -> "Counts":
        """Returns the counters of a `LossScaleOptimizer`."""
        attempted, skipped, in_a_row, _, changed = (
            optimizer.history.read_counts()
        )
        scale = float(optimizer.loss_scale)
        return cls(attempted, skipped, in_a_row, changed, scale)

    @property
    def applied(self) -> int:
        """The number of applied steps."""
        return self.attempted - self.skipped

    def collapsed(self, rule) -> bool:
        """Returns whether steps are still skipped at the lowest loss scale.

        Args:
            rule: `LossScale`.
        """
        # A fixed or scheduled loss scale never falls, so the scale is always at
        # its floor.
        floor = getattr(rule, "min_scale", math.inf)
        floor = _LEAST_USEFUL if floor is None else floor
        return self.scale <= floor and self.in_a_row >= TRIGGER_STEPS


class StepReader:
    """Reads the counters of one optimizer from time to time.

    Args:
        optimizer: A built `LossScaleOptimizer`.
        step: Int. The current step of the log.
        skipped: Int. Steps skipped so far in the whole log.
        first: Int. The first step that has no point in the log yet.
    """

    def __init__(self, optimizer, step: int, skipped: int, first: int):
        self.optimizer = optimizer
        self._begin = self._counts = Counts.of(optimizer)
        self._first_counts = optimizer.overflow_counts()
        self._changes_left = _CHANGES
        # The number of skipped steps in the log that this optimizer has not
        # counted: those of earlier `fit`s and other optimizers.
        self._skipped_earlier = skipped - self._begin.skipped
        self._step, self._first = step, first
        # Contents of the next `Reading`, collected from one reading to the
        # next.
        self._points = [self._point()]
        self._gaps: list = []
        self._new_steps: list = []
        self._others: list = []

    @property
    def first_scale(self) -> float:
        """The loss scale at the start."""
        return self._begin.scale

    def since_start(self) -> Counts:
        """Returns the current counters, with steps counted from the start."""
        now, begin = Counts.of(self.optimizer), self._begin
        return now._replace(
            attempted=now.attempted - begin.attempted,
            skipped=now.skipped - begin.skipped,
        )

    def overflow_counts(self) -> dict:
        """Returns the overflow counts since the start, by variable path."""
        return {
            path: count - self._first_counts.get(path, 0)
            for path, count in self.optimizer.overflow_counts().items()
        }

    def read(self, step: int) -> Reading:
        """Returns the counters, and all changes since the last call.

        Args:
            step: Int. Step of the log.
        """
        self._advance(step)
        optimizer, now, points = self.optimizer, self._point(), self._points
        if now not in (points[0], points[-1]):
            points.append(now)
        reading = Reading(
            points,
            self._gaps,
            now.skipped,
            self._counts.in_a_row,
            self._counts.collapsed(optimizer.rule),
            self._new_steps,
            self._others,
            optimizer.overflow_counts(),
            optimizer.gradient_norms(),
            self._first,
        )
        self._points = [now]
        self._gaps, self._new_steps, self._others = [], [], []
        return reading

    def set_scale(self, step: int, scale: float):
        """Sets the loss scale.

        Args:
            step: Int. Step of the log.
            scale: Float.
        """
        self._advance(step)
        self.optimizer.set_loss_scale(scale)
        self._advance(step)

    def _point(self):
        counts = self._counts
        skipped = self._skipped_earlier + counts.skipped
        return ScalePoint(self._step, counts.scale, skipped, counts.applied)

    def _advance(self, step):
        before, start = self._counts, self._step
        self._counts, self._step = Counts.of(self.optimizer), step
        attempted, skipped, _, changed, _ = (
            b - a for a, b in zip(before, self._counts, strict=True)
        )

        def at(number):
            """Returns the step of the log for an attempted step.

            The two step numbers differ if an optimizer steps several times per
            batch, or not in every batch.
            """
            past = max(number - before.attempted, 0)
            return start + -(-past * (step - start) // max(attempted, 1))

        # The counters of an optimizer fall only if a checkpoint was loaded.
        if min(attempted, skipped, changed) < 0:
            self._skipped_earlier -= skipped
            self._gaps.append((start, step))
        elif changed or self._counts.scale != before.scale:
            changes = self.optimizer.history.read_changes(changed)
            self._add_skipped(at, before, skipped, changes)
            known = self._add_points(at, before.scale, changes)
            if not known or len(changes) < changed:
                self._gaps.append((min(start + 1, step), step))

    def _add_skipped(self, at, before, count, changes):
        """Adds steps with a full record one by one, and the rest as a block."""
        recent = self.optimizer.nonfinite_steps()
        recent = recent[max(len(recent) - count, 0) :]
        self._new_steps += [x._replace(step=at(x.step)) for x in recent]
        if others := count - len(recent):
            first = before.attempted + 1
            last = recent[0].step - 1 if recent else self._counts.attempted
            numbers = [c.step for c in changes if c.was_skipped]
            if len(numbers) == count:
                first, last = numbers[0], numbers[others - 1]
            self._others.append((at(first), at(last), others))

    def _add_points(self, at, scale, changes):
        """Adds the changes of the scale; returns whether none is missing.

        Changes are missing if a script assigned a scale, or if more steps were
        skipped than the optimizer can record.
        """
        if self._changes_left <= 0:
            return False
        known = True

        def add(number, skipped, scale):
            self._changes_left -= 1
            applied, skipped = number - skipped, skipped + self._skipped_earlier
            point = ScalePoint(at(number), scale, skipped, applied)
            self._points.append(point)

        for number, skipped, was_skipped, ran_with, after in changes:
            if ran_with != scale:
                known = False
                add(number - 1, skipped - was_skipped, ran_with)
            if not was_skipped or after != ran_with:
                add(number, skipped, after)
            scale = after
        return known and scale == self._counts.scale
