"""Reading the steps that an optimizer has recorded since the last reading.

A scale at step `s` of a log is in use after `s` batches. The batch that Keras
numbers `s` runs with it. If the `s`th step is skipped (`at_step` of its event),
it ran with the scale of step `s - 1` and changes the scale at step `s`.
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

# This many skipped steps in a row are no scale search any more: from 2**15
# that finds a scale of 2**10, and few models need a smaller one.
TRIGGER_STEPS = 5

# A rule without a floor of its own counts as being at it here: float16's
# smallest normal number, the floor of `DynamicLossScale()`. A gradient that
# overflows float16 even so is above 1e9. Others stop earlier: fairseq raises
# below 1e-4 (`--min-loss-scale`), DeepSpeed, Megatron and jmp hold the scale
# at 1.
_LEAST_USEFUL = 2.0**-14

# Changes of the scale that are logged one by one, 0.1 kB each. A schedule may
# change it in every step of a long run.
_CHANGES = 20_000


class ScalePoint(NamedTuple):
    """A point of the curve of a loss scale; holds until the next.

    Attributes:
        step: Int. Step of the log.
        scale: Float. The scale in use after that many batches.
        skipped: Int. Steps skipped until then.
        applied: Int. Steps applied until then.
    """

    step: int
    scale: float
    skipped: int
    applied: int


def scale_curves(scale: float, name: str) -> dict:
    """Returns the points of the curves of a loss scale, tag -> number.

    Args:
        scale: Float.
        name: As for `Reading.curves`.
    """
    # Keras' own optimizer may lower its scale to 0.
    log2 = math.log2(scale) if scale else -math.inf
    return {
        curve_tag("mixprec/loss_scale", name): scale,
        curve_tag("mixprec/log2_loss_scale", name): log2,
    }


class Reading(NamedTuple):
    """The result of one reading of an optimizer's counters.

    Attributes:
        points: List of `ScalePoint`s: the last one of the reading before, all
            changes of the scale since then, and now.
        gaps: List of pairs of steps between which changes are not all known.
        skipped: Int. Steps skipped so far, in the whole log.
        in_a_row: Int. Steps skipped since the last one applied.
        collapsed: Boolean, whether steps in a row are still skipped at a scale
            that is as low as it can be, or as any model needs.
        new_steps: List of the `NonfiniteStep`s since the last reading, with
            the log's numbers.
        others: List of triples, skipped steps since then that the optimizer no
            longer remembers in full: the first and the last that they can be,
            and how many they are.
        overflow_counts: Dict path -> number of steps it overflowed in.
        gradient_norms: Dict path -> unscaled norm of the last step.
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

        In a row, or down to a scale below 1: what overflows at 1 overflows in
        float16 without any scale.
        """
        is_low = self.skipped >= TRIGGER_STEPS and self.loss_scale < 1
        return self.in_a_row >= TRIGGER_STEPS or is_low

    def continued(self, again: "Reading") -> "Reading":
        """Returns one reading of this and another at the same step.

        Args:
            again: `Reading` after the scale was set.
        """
        points = self.points + again.points[1:]
        return self._replace(points=points, collapsed=again.collapsed)

    def curves(self, name: str = "", by_variable: bool = True) -> dict:
        """Returns the curves to draw, step -> tag -> number.

        Args:
            name: String. Which of several optimizers it is, `""` if there is
                one.
            by_variable: Boolean, whether to return the curves of each variable.
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
        """Step and scale at both ends of each stretch without a change.

        TensorBoard draws straight lines between points.
        """
        start, *others = self.points
        if not others:
            own = start.step >= self.first
            return [(start.step, start.scale)] if own else []
        corners, scale = {}, start.scale
        # The curve may have another scale there, from an earlier `fit` or from
        # before it was set by hand.
        if start.step < self.first or others[0].step == start.step:
            scale = [p for p in self.points if p.step == start.step][-1].scale
            corners[start.step + 1] = scale
        for point in others:
            if point.scale != scale:
                corners.setdefault(point.step - 1, scale)
            corners[point.step] = scale = point.scale
        return sorted(c for c in corners.items() if c[0] > start.step)


class Counts(NamedTuple):
    """The counters of an optimizer, read at once.

    Attributes:
        attempted: Int. Steps taken or skipped.
        skipped: Int. Steps skipped.
        in_a_row: Int. Steps skipped since the last one applied.
        changed: Int. How many `ScaleChange`s were recorded.
        scale: Float. The loss scale.
    """

    attempted: int
    skipped: int
    in_a_row: int
    changed: int
    scale: float

    @classmethod
    def of(cls, optimizer) -> "Counts":
        """Returns the counters of a `LossScaleOptimizer`, built or not."""
        attempted, skipped, in_a_row, _, changed = (
            optimizer.history.read_counts()
        )
        scale = float(optimizer.loss_scale)
        return cls(attempted, skipped, in_a_row, changed, scale)

    @property
    def applied(self) -> int:
        """Steps applied."""
        return self.attempted - self.skipped

    def collapsed(self, rule) -> bool:
        """Returns whether steps are skipped at as low a scale as there is.

        Args:
            rule: `LossScale`.
        """
        # A fixed or scheduled scale does not fall at all.
        floor = getattr(rule, "min_scale", math.inf)
        floor = _LEAST_USEFUL if floor is None else floor
        return self.scale <= floor and self.in_a_row >= TRIGGER_STEPS


class StepReader:
    """Reads the counters of one optimizer from time to time.

    Args:
        optimizer: A built `LossScaleOptimizer`.
        step: Int. The step of the log that its next step is.
        skipped: Int. Steps skipped so far in the whole log.
        first: Int. The first step that has no point in the log yet.
    """

    def __init__(self, optimizer, step: int, skipped: int, first: int):
        self.optimizer = optimizer
        self._begin = self._counts = Counts.of(optimizer)
        self._first_counts = optimizer.overflow_counts()
        self._changes_left = _CHANGES
        # This is added to the optimizer's count of skipped steps.
        self._skipped_earlier = skipped - self._begin.skipped
        self._step, self._first = step, first
        # Since the last reading, as in `Reading`.
        self._points = [self._point()]
        self._gaps: list = []
        self._new_steps: list = []
        self._others: list = []

    @property
    def first_scale(self) -> float:
        """The loss scale at the start."""
        return self._begin.scale

    def since_start(self) -> Counts:
        """Returns the counters as of now, with the steps since the start."""
        now, begin = Counts.of(self.optimizer), self._begin
        return now._replace(
            attempted=now.attempted - begin.attempted,
            skipped=now.skipped - begin.skipped,
        )

    def overflow_counts(self) -> dict:
        """Returns, by path, in how many steps it overflowed since the start."""
        return {
            path: count - self._first_counts.get(path, 0)
            for path, count in self.optimizer.overflow_counts().items()
        }

    def read(self, step: int) -> Reading:
        """Returns the state of the counters, and the news since the last call.

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
            """The step of the log of an attempted step.

            An optimizer may step several times a batch, or not in each.
            """
            past = max(number - before.attempted, 0)
            return start + -(-past * (step - start) // max(attempted, 1))

        if min(attempted, skipped, changed) < 0:  # A checkpoint was loaded.
            self._skipped_earlier -= skipped
            self._gaps.append((start, step))
        elif changed or self._counts.scale != before.scale:
            changes = self.optimizer.history.read_changes(changed)
            self._add_skipped(at, before, skipped, changes)
            known = self._add_points(at, before.scale, changes)
            if not known or len(changes) < changed:
                self._gaps.append((min(start + 1, step), step))

    def _add_skipped(self, at, before, count, changes):
        """Adds the steps that are kept in full, and the others as a block."""
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
        """Adds the changes of the scale; returns whether these are all.

        They are not if a script has assigned to the scale's variable, or more
        steps were skipped than an optimizer remembers.
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
