"""The counters of a model in `fit`, and when to end a failing run."""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import keras

from keras_mixprec import _clock
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import NONFINITE_KINDS
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.rules import (
    SMALLEST_SCALE,
    DynamicLossScale,
    FixedLossScale,
)
from keras_mixprec.monitoring.attach import guard_of, watch_optimizers
from keras_mixprec.monitoring.recorded_steps import StepReader, scale_curves
from keras_mixprec.reporting.schema import (
    NONFINITE_GRADIENTS_TAG,
    NONFINITE_LOSSES_TAG,
    SKIPPED_TAG,
    curve_tag,
)

# When the floor of a loss scale must be lowered, the new floor is this fraction
# of the scale, as in `DynamicLossScale()` at a scale of 1.
_ROOM_TO_FALL = 2.0**-14


def reason_to_stop(reading, verdicts, stop_after: int | None) -> str | None:
    """Returns the reason to stop training early, or `None`.

    Args:
        reading: `Reading` of an optimizer.
        verdicts: List of the `Verdict`s of the run.
        stop_after: Int. The number of skipped steps in a row that stops
            training, or `None` for no limit.
    """
    if stop_after is None or reading.in_a_row < stop_after:
        return None
    skipped = f"{reading.in_a_row} steps in a row were skipped"
    if any(verdict.kind == "weights_lost" for verdict in verdicts):
        return f"{skipped} and the weights are not finite"
    if reading.collapsed:
        scale = f"{reading.loss_scale:g}"
        return f"{skipped} and a loss scale of {scale} does not help either"
    return skipped


class Glance(NamedTuple):
    """A few counters since the start, for the monitor and the tuner.

    Attributes:
        skipped: Tuple with the number of skipped steps of each optimizer.
        in_a_row: Int. Steps skipped since the last applied step, for the
            optimizer that has skipped the most.
        losses: Int. The number of batches with a non-finite loss.
        mean_is_lost: Boolean, whether the mean loss is not finite, for models
            whose non-finite losses are not counted.
    """

    skipped: tuple = ()
    in_a_row: int = 0
    losses: int = 0
    mean_is_lost: bool = False

    @property
    def nonfinite(self) -> int:
        """The number of steps that were skipped or had a non-finite loss."""
        return max(*self.skipped, self.losses, 0)


class Counters:
    """The counters of a model's optimizers and of the guard of its metrics.

    Args:
        model: A compiled `keras.Model`, with variables that are synchronized.
        log: The `RunLog`.
        step: Int. The step of the log at which training starts.
    """

    def __init__(self, model, log, step):
        self._model = model
        self._readers = {
            name: StepReader(
                optimizer,
                step,
                log.counts.get(curve_tag(SKIPPED_TAG, name), 0),
                log.next_step,
            )
            for name, optimizer in watch_optimizers(model).items()
        }
        # Dict from TensorBoard tag to the function that reads the counts of
        # non-finite numbers.
        self._by_kind = {
            curve_tag(NONFINITE_GRADIENTS_TAG, name): o.nonfinite_counts
            for name, o in self._optimizers().items()
        }
        if guard_of(model).on:
            first, *_ = self._optimizers().values()
            self._by_kind[NONFINITE_LOSSES_TAG] = first.nonfinite_losses
        self._first = {tag: read() for tag, read in self._by_kind.items()}
        self._earlier = log.counts

    def used(self) -> dict[str, StepReader]:
        """Returns the `StepReader` of each optimizer that training uses.

        `compile` without an optimizer creates a default one. A custom
        `train_step` with its own optimizers never uses this default. A single
        optimizer has the name `""`.
        """
        others = len(optimizers_of(self._model)) > 1
        return {
            name: reader
            for name, reader in self._readers.items()
            if not (others and name in ("", "optimizer"))
            or reader.optimizer.attempted_steps
        }

    def optimizers(self) -> dict:
        """Returns all loss scale optimizers, by attribute name."""
        return {n or "optimizer": o for n, o in self._optimizers().items()}

    def _optimizers(self):
        return {name: r.optimizer for name, r in self._readers.items()}

    def attempted(self) -> int | None:
        """Returns the steps attempted since the start.

        Returns `None` unless a single optimizer takes all steps.
        """
        only = self.used().get("")
        return None if only is None else only.since_start().attempted

    def now(self, sums: tuple | None) -> "Glance":
        """Returns the current `Glance`.

        Args:
            sums: Tuple or `None`, from `LossCurve.read`.
        """
        counts = [reader.since_start() for reader in self.used().values()]
        losses = self.nonfinite_losses()
        return Glance(
            tuple(each.skipped for each in counts),
            max((each.in_a_row for each in counts), default=0),
            sum((losses or {}).values()),
            losses is None and not (sums is None or math.isfinite(sums[0])),
        )

    def nonfinite_losses(self) -> dict | None:
        """Returns the number of non-finite losses since the start, by kind.

        Returns `None` if they are not counted.
        """
        return self._since_start(NONFINITE_LOSSES_TAG)

    def _since_start(self, tag):
        if tag not in self._by_kind:
            return None
        now, first = self._by_kind[tag](), self._first[tag]
        return {kind: now[kind] - first[kind] for kind in NONFINITE_KINDS}

    def nonfinite_gradients(self, name: str) -> dict:
        """Returns the number of steps with non-finite gradients, by kind.

        Args:
            name: String. The optimizer's name, as in `used`.
        """
        return self._since_start(curve_tag(NONFINITE_GRADIENTS_TAG, name))

    def nonfinite_curves(self) -> dict:
        """Returns the counts of non-finite losses and gradients, by tag."""
        curves = {
            f"{tag}/{kind}": count + self._earlier.get(f"{tag}/{kind}", 0)
            for tag in self._by_kind
            for kind, count in self._since_start(tag).items()
        }
        return {tag: count for tag, count in curves.items() if count > 0}

    def scales_of_subclasses(self) -> dict:
        """Returns the loss scales of user subclasses, by tag.

        A user's subclass of Keras' loss scale optimizer stays in the model, and
        counts no skipped steps.
        """
        curves: dict = {}
        for name, optimizer in self._subclasses().items():
            scale = float(active.step().read(optimizer.dynamic_scale))
            curves |= scale_curves(scale, name)
        return curves

    def _subclasses(self):
        wrapper = keras.optimizers.LossScaleOptimizer
        found = {
            name: optimizer
            for name, optimizer in optimizers_of(self._model).items()
            if isinstance(optimizer, wrapper)
            and not isinstance(optimizer, LossScaleOptimizer)
            and optimizer.built
        }
        only = list(found) == ["optimizer"] and not self._readers
        return {"": found["optimizer"]} if only else found

    def nonfinite_events(self) -> list:
        """Returns events with the counts of non-finite losses and gradients."""
        losses = self.nonfinite_losses() or {}
        events: list[dict] = [{"kind": "nonfinite_losses", "counts": losses}]
        events += [
            {
                "kind": "nonfinite_gradients",
                "optimizer": name,
                "counts": self.nonfinite_gradients(name),
            }
            for name in self._readers
        ]
        return [event for event in events if any(event["counts"].values())]

    def scale_bits(self) -> float:
        """Returns log2 of the largest loss scale in use."""
        used = self.used().values()
        scales = [float(reader.optimizer.loss_scale) for reader in used]
        return math.log2(max(scales, default=1.0))

    def collapsed(self) -> bool:
        """Returns whether any loss scale has collapsed."""
        return any(
            reader.since_start().collapsed(reader.optimizer.rule)
            for reader in self.used().values()
        )

    def raise_scales(
        self, bits: float, step: int, beyond_first: bool = False
    ) -> bool:
        """Raises loss scales that are lower than the model needs.

        Args:
            bits: Float. log2 of the loss scale that suits the model.
            step: Int. Step of the log.
            beyond_first: Boolean, whether a scale may exceed its first value.
                Defaults to `False`.

        Returns:
            True if any scale was raised.
        """
        raised = False
        for reader in self.used().values():
            rule = reader.optimizer.rule
            if isinstance(rule, DynamicLossScale):
                highest = rule.max_scale or math.inf
                highest = highest if beyond_first else reader.first_scale
                scale = min(2.0**bits, highest)
                if scale > float(reader.optimizer.loss_scale):
                    reader.set_scale(step, scale)
                    raised = True
        return raised

    def set_scales(
        self, bits: float, step: int, may_recompile: bool
    ) -> tuple[bool, bool]:
        """Sets loss scales that are fixed, or that a floor keeps too high.

        After a floor is lowered, the caller has to recompile the train
        function, because the floor is compiled into it.

        Args:
            bits: Float. log2 of the loss scale that suits the model.
            step: Int. Step of the log.
            may_recompile: Boolean, whether floors may be lowered.

        Returns:
            Two booleans: whether any scale was set, and whether any floor was
            lowered.
        """
        done, lowered, scale = False, False, 2.0**bits
        for reader in self.used().values():
            optimizer = reader.optimizer
            is_fixed = isinstance(optimizer.rule, FixedLossScale)
            floor = getattr(optimizer.rule, "min_scale", None) or 0.0
            if not is_fixed and not (may_recompile and floor > scale):
                continue
            if not is_fixed:
                floor = max(scale * _ROOM_TO_FALL, SMALLEST_SCALE)
                optimizer.rule = optimizer.rule.with_arguments(min_scale=floor)
                lowered = True
            reader.set_scale(step, scale)
            done = True
        return done, lowered

    @contextlib.contextmanager
    def synchronized(self, more: list | None = None) -> Iterator[float]:
        """Context in which the counters include the last step.

        It yields the seconds spent waiting for running steps.

        Args:
            more: List of metric variables to synchronize as well.
        """
        own = self._optimizers().values()
        counters = [v for optimizer in own for v in optimizer.counters]
        counters += more or []
        # A model without loss scaling has no counters of skipped steps. Reading
        # `optimizer.iterations` waits for the model's running steps instead.
        others = [] if self._readers else optimizers_of(self._model).values()
        counters += [optimizer.iterations for optimizer in others]
        counters += [own.dynamic_scale for own in self._subclasses().values()]
        with active.batches().synchronized(self._model, counters):
            started = _clock.now()
            for reader in self._readers.values():
                reader.since_start()
            for optimizer in others:
                active.step().read(optimizer.iterations)
            yield _clock.now() - started
