"""What a model in `fit` counts, and when to end a run that cannot recover."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import keras

from keras_mixprec import _clock
from keras_mixprec._console import print_message
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import NONFINITE_KINDS
from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.rules import SMALLEST_SCALE, FixedLossScale
from keras_mixprec.monitoring.attach import guard_of, watch_optimizers
from keras_mixprec.monitoring.recorded_steps import StepReader
from keras_mixprec.reporting.schema import (
    NONFINITE_GRADIENTS_TAG,
    NONFINITE_LOSSES_TAG,
    SKIPPED_TAG,
    curve_tag,
)

# How far below a loss scale its new floor is, as the first one is below 1.
_ROOM_TO_FALL = 2.0**-14


def reason_to_stop(reading, verdicts, stop_after: int | None) -> str | None:
    """Returns the reason to stop early, or `None`.

    Args:
        reading: `Reading` of an optimizer.
        verdicts: List of the `Verdict`s of the run.
        stop_after: Int. Skipped steps in a row to wait for, `None` for ever.
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


class EarlyStop:
    """Ends a `fit`, once, in the way that was asked for.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
        settings: `Settings`.
    """

    def __init__(self, model, log, settings):
        self._model = model
        self._log = log
        self._settings = settings
        self._stopped = False
        self._failure = None

    @property
    def failed(self) -> bool:
        """Whether an exception is to end `fit`."""
        return self._failure is not None

    def stop(self, step: int, reason: str):
        """Stops training, or lets it end with an exception.

        Args:
            step: Int. The number of the next batch.
            reason: String.
        """
        if self._stopped:
            return
        self._stopped = True
        self._log.event(step, {"kind": "stopped", "reason": reason})
        if self._settings.on_stop == "raise":
            where = self._log.folder or "the log of the first worker"
            self.fail(
                f"MixPrecMonitor stops at step {step}: {reason}. See "
                f"{where} for what is wrong, or pass `on_stop='stop'`."
            )
            return
        self._model.stop_training = True
        if self._settings.verbose:
            print_message(f"MixPrecMonitor stops here: {reason}.")

    def fail(self, reason: str):
        """Lets `fit` end with an exception as soon as it can.

        Args:
            reason: String. Its message.
        """
        self._failure = reason

    def raise_if_failed(self, callbacks):
        """Raises what was asked for, with our own callbacks at their end.

        Others do not come to theirs, where `BackupAndRestore` deletes its
        backup.

        Args:
            callbacks: List of our callbacks of this `fit`.
        """
        if not self.failed:
            return
        reason, self._failure = self._failure, None
        for callback in [*callbacks]:
            callback.on_train_end()
        raise FloatingPointError(reason)


class Tally:
    """What was not finite since a `fit` started, and in its log before.

    Args:
        tag: String. What its curves are called, each with a kind behind it.
        read: Function that returns the counts by kind, as of now.
        earlier: Dict from tags to what earlier runs counted.
    """

    def __init__(self, tag: str, read: Callable, earlier: Mapping):
        self._tags = {kind: f"{tag}/{kind}" for kind in NONFINITE_KINDS}
        self._read, self._first = read, read()
        self._earlier = earlier

    def counts(self) -> dict:
        """Returns how often each kind was seen since the start."""
        now = self._read()
        return {kind: now[kind] - self._first[kind] for kind in NONFINITE_KINDS}

    def curves(self) -> dict:
        """Returns tag -> count in the whole log, of the kinds ever seen."""
        counts = {
            self._tags[kind]: count + self._earlier.get(self._tags[kind], 0)
            for kind, count in self.counts().items()
        }
        return {tag: count for tag, count in counts.items() if count > 0}


class Glance(NamedTuple):
    """What monitor and tuner both ask of the steps since the start.

    Attributes:
        skipped: List of the number of skipped steps of each optimizer.
        in_a_row: Int. The most steps skipped since the last one applied.
        losses: Int. How many batches had a loss that is not finite.
    """

    skipped: list
    in_a_row: int
    losses: int

    @property
    def nonfinite(self) -> int:
        """How many steps were skipped or had a loss that is not finite."""
        return max([*self.skipped, self.losses])


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
        self._gradients = {
            name: Tally(
                curve_tag(NONFINITE_GRADIENTS_TAG, name),
                reader.optimizer.nonfinite_counts,
                log.counts,
            )
            for name, reader in self._readers.items()
        }
        guard, self._losses = guard_of(model), None
        if guard.on and guard.counters:
            self._losses = Tally(
                NONFINITE_LOSSES_TAG,
                lambda: guard_of(model).nonfinite_losses,
                log.counts,
            )

    def used(self) -> dict[str, StepReader]:
        """Returns the `StepReader` of each optimizer that training uses.

        `compile` without an optimizer makes one that a `train_step` with
        others of its own never uses. The name of the only one is `""`.
        """
        others = len(optimizers_of(self._model)) > 1
        return {
            name: reader
            for name, reader in self._readers.items()
            if not (others and name in ("", "optimizer"))
            or reader.optimizer.attempted_steps
        }

    def optimizers(self) -> dict:
        """Returns all loss scale optimizers, by the name of the attribute."""
        return {
            name or "optimizer": reader.optimizer
            for name, reader in self._readers.items()
        }

    def rule(self, name: str):
        """Returns the `LossScale` of an optimizer, by its name in `used`."""
        return self._readers[name].optimizer.rule

    def attempted(self) -> int | None:
        """Returns the steps attempted since the start.

        `None` where not every step is one of a single optimizer.
        """
        only = self.used().get("")
        return None if only is None else only.since_start().attempted

    def now(self) -> "Glance":
        """Returns what few numbers say of the run, as of now."""
        counts = [reader.since_start() for reader in self.used().values()]
        losses = self.nonfinite_losses() or {}
        return Glance(
            [each.skipped for each in counts],
            max((each.in_a_row for each in counts), default=0),
            sum(losses.values()),
        )

    def nonfinite_losses(self) -> dict | None:
        """Returns, by kind, how many batches had a loss not finite.

        Since the start; `None` where that is not counted.
        """
        return self._losses and self._losses.counts()

    def only_mean_is_lost(self, sums: tuple | None) -> bool:
        """Whether no loss is counted, and their mean is not finite.

        Args:
            sums: What `LossCurve.read` returned.
        """
        return not (self._losses or sums is None or math.isfinite(sums[0]))

    def nonfinite_gradients(self, name: str) -> dict:
        """Returns, by kind, in how many steps a gradient was not finite.

        Args:
            name: String. Which optimizer's, as in `used`.
        """
        return self._gradients[name].counts()

    def nonfinite_curves(self) -> dict:
        """Returns tag -> count in the whole log, of what was not finite."""
        curves = self._losses.curves() if self._losses else {}
        for tally in self._gradients.values():
            curves |= tally.curves()
        return curves

    def scales_of_subclasses(self) -> dict:
        """Returns tag -> loss scale, of what is derived from Keras' optimizer.

        Such an optimizer is left as it is, and counts no skipped steps.
        """
        found = {}
        for name, optimizer in self._subclasses().items():
            scale = float(active.step().read(optimizer.dynamic_scale))
            found[curve_tag("mixprec/loss_scale", name)] = scale
            if 0.0 < scale < math.inf:
                tag = curve_tag("mixprec/log2_loss_scale", name)
                found[tag] = math.log2(scale)
        return found

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
        """Returns an event for the loss and each optimizer, if any is due."""
        losses = self.nonfinite_losses() or {}
        events: list[dict] = [{"kind": "nonfinite_losses", "counts": losses}]
        events += [
            {
                "kind": "nonfinite_gradients",
                "optimizer": name,
                "counts": self.nonfinite_gradients(name),
            }
            for name in self._gradients
        ]
        return [event for event in events if any(event["counts"].values())]

    def scale_bits(self) -> float:
        """Returns the largest loss scale in use, as a power of two."""
        used = self.used().values()
        scales = [float(reader.optimizer.loss_scale) for reader in used]
        return math.log2(max(scales, default=1.0))

    def all(self) -> list[StepReader]:
        """Returns the `StepReader` of each loss scale optimizer."""
        return list(self._readers.values())

    def collapsed(self) -> bool:
        """Returns whether any loss scale has collapsed, as of now."""
        return any(
            reader.since_start().collapsed(reader.optimizer.rule)
            for reader in self.used().values()
        )

    def raise_scale(
        self, bits: float, step: int, beyond_first: bool = False
    ) -> bool:
        """Raises loss scales that are below what is needed now.

        Args:
            bits: Float. The scale that suits the model, as a power of two.
            step: Int. Step of the log.
            beyond_first: Boolean. Whether above where they started as well.
                Defaults to `False`.

        Returns:
            Boolean. Whether any was raised.
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

    def set_fixed_scale(self, bits: float, step: int) -> bool:
        """Sets the loss scales that are fixed numbers.

        Args:
            bits: Float. The scale that suits the model, as a power of two.
            step: Int. Step of the log.

        Returns:
            Boolean. Whether any was set.
        """
        fixed = [
            reader
            for reader in self.used().values()
            if isinstance(reader.optimizer.rule, FixedLossScale)
        ]
        for reader in fixed:
            reader.set_scale(step, 2.0**bits)
        return bool(fixed)

    def lower_floor(self, bits: float, step: int) -> bool:
        """Lets loss scales fall further that their `min_scale` kept above.

        A train function that is compiled still knows the old one.

        Args:
            bits: Float. The scale that suits the model, as a power of two.
            step: Int. Step of the log.

        Returns:
            Boolean. Whether any was kept above.
        """
        lowered = False
        for reader in self.used().values():
            optimizer, scale = reader.optimizer, 2.0**bits
            if (getattr(optimizer.rule, "min_scale", None) or 0.0) > scale:
                floor = max(scale * _ROOM_TO_FALL, SMALLEST_SCALE)
                optimizer.rule = optimizer.rule.with_arguments(min_scale=floor)
                reader.set_scale(step, scale)
                lowered = True
        return lowered

    @contextlib.contextmanager
    def synchronized(self, more: list | None = None) -> Iterator[float]:
        """Context in which counters are those of the last step.

        It is given the seconds that the steps under way took to end.

        Args:
            more: List of variables of metrics that are read as well.
        """
        holders = [*self.optimizers().values(), guard_of(self._model)]
        counters = [v for holder in holders for v in holder.counters]
        counters += more or []
        # What is read of a model without loss scaling, to wait for its steps.
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
