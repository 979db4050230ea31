"""Reading what an optimizer recorded since the last reading.

A scale at step `s` of a log is the one in use after `s` batches: the batch
that Keras counts as `s` runs with it, and a step that is skipped as the `s`th
(`at_step` of its event) changes it there, having run with that of `s - 1`.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Block:
    """Steps of a log of which something is not known one by one.

    Attributes:
        first_step, last_step: Int. The first and the last they can be.
        count: Int. How many of these they are.
    """

    first_step: int
    last_step: int
    count: int

    def joined(self, earlier: "Block | None") -> "Block":
        """Returns one block of this and an earlier one.

        Args:
            earlier: `Block`, or `None` if there is none.
        """
        if earlier is None:
            return self
        count = earlier.count + self.count
        return Block(earlier.first_step, self.last_step, count)


class Reading(NamedTuple):
    """What one reading of an optimizer's counters found.

    Attributes:
        points: List of `ScalePoint`s: the last one of the reading before, all
            changes of the scale since then, and now.
        gaps: List of pairs of steps between which changes are not all known.
        skipped: Int. Steps skipped so far, in the whole log.
        in_a_row: Int. Steps skipped since the last one applied.
        collapsed: Boolean. Whether steps in a row are still skipped at a scale
            that is as low as it can be, or as any model needs.
        new_steps: List of the `NonfiniteStep`s since the last reading, with
            the log's numbers.
        others: List of `Block`s of skipped steps since then that the optimizer
            no longer remembers in full.
        overflow_counts: Dict path -> number of steps it overflowed in.
        gradient_norms: Dict path -> unscaled norm of the last step.
        first: Int. The first step of which the log has no point yet.
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
        """The step of the log at which this was read."""
        return self.points[-1].step

    @property
    def loss_scale(self) -> float:
        """The scale in use now."""
        return self.points[-1].scale

    @property
    def grown(self) -> bool:
        """Whether the scale has risen since the last reading."""
        scales = [point.scale for point in self.points]
        return any(b > a for a, b in itertools.pairwise(scales))

    @property
    def stuck(self) -> bool:
        """Whether more steps in a row are skipped than a search explains."""
        return self.in_a_row >= TRIGGER_STEPS

    @property
    def below_1(self) -> bool:
        """Whether as many skipped steps have taken the scale to below 1.

        What overflows at 1 does so in float16 whatever the scale is for.
        """
        return self.skipped >= TRIGGER_STEPS and self.loss_scale < 1

    def continued(self, again: "Reading") -> "Reading":
        """Returns one reading of this and another at the same step.

        Args:
            again: `Reading` after the scale was set.
        """
        points = self.points + again.points[1:]
        return self._replace(points=points, collapsed=again.collapsed)

    def curves(self, name: str = "", by_variable: bool = True) -> dict:
        """Returns what to draw, step -> tag -> number.

        Args:
            name: String. Which of several optimizers it is, `""` if there is
                one.
            by_variable: Boolean. Whether those of each variable as well.
        """
        curves = {
            step: {
                curve_tag("mixprec/loss_scale", name): scale,
                curve_tag("mixprec/log2_loss_scale", name): math.log2(scale),
            }
            for step, scale in self._corners()
        }
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
        # What is drawn there may be another scale: that of an earlier `fit`,
        # or the one in use before it was set by hand.
        if start.step < self.first or others[0].step == start.step:
            scale = [p for p in self.points if p.step == start.step][-1].scale
            corners[start.step + 1] = scale
        for point in others:
            if point.scale != scale:
                corners.setdefault(point.step - 1, scale)
            corners[point.step] = scale = point.scale
        return sorted(c for c in corners.items() if c[0] > start.step)


@dataclasses.dataclass
class _New:
    """What there is since the last reading, as in `Reading`."""

    points: list
    gaps: list = dataclasses.field(default_factory=list)
    new_steps: list = dataclasses.field(default_factory=list)
    others: list = dataclasses.field(default_factory=list)


class _Moment(NamedTuple):
    """The counters of an optimizer at a reading.

    Attributes:
        point: `ScalePoint`.
        attempted: Int. Steps that the optimizer has attempted.
        changed: Int. How many `ScaleChange`s it has recorded.
    """

    point: ScalePoint
    attempted: int
    changed: int


def _at(number, before, now):
    """The step of the log at which an attempted step was taken.

    An optimizer may step several times a batch, or not in each.
    """
    attempted = max(now.attempted - before.attempted, 1)
    past = max(number - before.attempted, 0)
    steps = now.point.step - before.point.step
    return before.point.step + -(-past * steps // attempted)


class StepReader:
    """Reads the counters of one optimizer from time to time.

    Args:
        optimizer: A built `LossScaleOptimizer`.
        step: Int. The step of the log that its next step is.
        skipped: Int. Steps skipped so far in the whole log.
        first: Int. The first step of which the log has no point yet.
    """

    def __init__(self, optimizer, step: int, skipped: int, first: int):
        self.optimizer = optimizer
        self.first_attempted = optimizer.attempted_steps
        self.first_skipped = optimizer.skipped_steps
        self.first_scale = float(optimizer.loss_scale)
        self._first_counts = optimizer.overflow_counts()
        self._changes_left = _CHANGES
        self._skipped_earlier = skipped
        self._first = first
        self._now = self._moment(step)
        self._new = _New([self._now.point])

    def read(self, step: int) -> Reading:
        """Returns what there is to report, and what is new since the last.

        Args:
            step: Int. Step of the log.
        """
        self._advance(step)
        optimizer, now, new = self.optimizer, self._now.point, self._new
        if now not in (new.points[0], new.points[-1]):
            new.points.append(now)
        self._new = _New([now])
        return Reading(
            **vars(new),
            skipped=now.skipped,
            in_a_row=optimizer.consecutive_skipped_steps,
            collapsed=self.collapsed(),
            overflow_counts=optimizer.overflow_counts(),
            gradient_norms=optimizer.gradient_norms(),
            first=self._first,
        )

    def set_scale(self, step: int, scale: float):
        """Sets the loss scale.

        Args:
            step: Int. Step of the log.
            scale: Float.
        """
        self._advance(step)
        self.optimizer.set_loss_scale(scale)
        self._advance(step)

    def _moment(self, step):
        optimizer = self.optimizer
        attempted, skipped, *_, changed = optimizer.history.read_counts()
        point = ScalePoint(
            step,
            float(optimizer.loss_scale),
            self._skipped_earlier + skipped - self.first_skipped,
            attempted - skipped,
        )
        return _Moment(point, attempted, changed)

    def _advance(self, step):
        before, now = self._now, self._moment(step)
        attempted = now.attempted - before.attempted
        changed = now.changed - before.changed
        skipped = now.point.skipped - before.point.skipped
        if min(attempted, changed, skipped) < 0:  # A checkpoint was loaded.
            self._skipped_earlier -= skipped
            now = self._moment(step)
            self._new.gaps.append((before.point.step, step))
        elif changed or now.point.scale != before.point.scale:
            changes = self.optimizer.history.read_changes(changed)
            self._add_skipped(before, now, changes)
            self._add_points(before, now, changes, len(changes) == changed)
        self._now = now

    def _add_skipped(self, before, now, changes):
        """Adds the steps that are kept in full, and the others as a block."""
        count = now.point.skipped - before.point.skipped
        recent = self.optimizer.nonfinite_steps()
        recent = recent[max(len(recent) - count, 0) :]
        self._new.new_steps += [
            step._replace(step=_at(step.step, before, now)) for step in recent
        ]
        if others := count - len(recent):
            first = before.attempted + 1
            last = recent[0].step - 1 if recent else now.attempted
            numbers = [c.step for c in changes if c.was_skipped]
            if len(numbers) == count:
                first, last = numbers[0], numbers[others - 1]
            first, last = (_at(n, before, now) for n in (first, last))
            self._new.others.append(Block(first, last, others))

    def _add_points(self, before, now, changes, known):
        """Adds the changes of the scale, and whether they are not all known.

        They are not where a script has assigned to the scale's variable, or
        more steps were skipped than an optimizer remembers.
        """
        own = before.attempted - before.point.applied
        earlier, scale = before.point.skipped - own, before.point.scale

        def add(number, skipped, scale):
            self._changes_left -= 1
            at, applied = _at(number, before, now), number - skipped
            point = ScalePoint(at, scale, earlier + skipped, applied)
            self._new.points.append(point)

        if self._changes_left <= 0:
            changes, known = [], False
        for change in changes:
            number, skipped, was_skipped, ran_with, after = change
            if ran_with != scale:
                known = False
                add(number - 1, skipped - was_skipped, ran_with)
            if not was_skipped or after != ran_with:
                add(number, skipped, after)
            scale = after
        if not known or scale != now.point.scale:
            last = now.point.step
            self._new.gaps.append((min(before.point.step + 1, last), last))

    def collapsed(self) -> bool:
        """Returns whether steps are skipped at as low a scale as there is."""
        optimizer = self.optimizer
        # A fixed or scheduled scale does not fall at all.
        floor = getattr(optimizer.rule, "min_scale", math.inf)
        floor = _LEAST_USEFUL if floor is None else floor
        in_a_row = optimizer.consecutive_skipped_steps
        low = float(optimizer.loss_scale) <= floor
        return low and in_a_row >= TRIGGER_STEPS

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
