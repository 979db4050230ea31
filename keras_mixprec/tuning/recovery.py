"""Returns to the last good state, with what made training diverge changed."""

import functools
import math
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_mixprec.diagnosis.criterion import norm
from keras_mixprec.keras_internals import learning_rate_object
from keras_mixprec.loss_scaling.spikes import Spikes, gates_of
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.rehearsal import updating
from keras_mixprec.verdict_kinds import LOST

# Spikes in a row after which the weights may be at fault, and not the data.
_STREAK = 3


@keras.saving.register_keras_serializable("keras_mixprec")
class LoweredSchedule(LearningRateSchedule):
    """A learning rate schedule times a factor.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.
        factor: Float.
    """

    def __init__(self, schedule: Any, factor: float):
        self.schedule = schedule
        self.factor = factor

    def __call__(self, step):
        """Returns the rate at a step."""
        return self.schedule(step) * self.factor

    def get_config(self) -> dict:
        """Returns the arguments."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": self.factor}

    @classmethod
    def from_config(cls, config: dict) -> "LoweredSchedule":
        """Creates it from what `get_config` returned."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["factor"])


class Recovery:
    """Returns to a good state, and changes what made training leave it.

    Args:
        watch: The `Watch`.
        repairs: `Repairs` of the model.
        most: Int. How often it may return.
    """

    def __init__(self, watch, repairs, most: int):
        self._watch = watch
        self._repairs = repairs
        self._left = most
        self._stopped_at: Any = None
        self._told = 0
        self._has_looked = False

    def helps(self, examination) -> bool:
        """Whether nothing but another state helps against what was found."""
        lost = any(
            verdict.kind in LOST and "not_finite" not in verdict.numbers
            for verdict, _ in examination.findings
        )
        return lost and bool(self._watch.examiner.states.held)

    def run(self, examination) -> tuple:
        """Returns to a good state.

        Training stops there if what was to blame cannot be changed here.

        Args:
            examination: `Examination`.

        Returns:
            The step of that state, and what was changed, `None` for nothing.
        """
        numbers: dict = {}
        for finding in examination.findings:
            numbers = finding.verdict.numbers | numbers
        change = _CHANGES.get(numbers.get("cause", ""))
        return self._back_to(
            numbers.get("since"),
            functools.partial(change, self, numbers) if change else None,
        )

    def _back_to(self, step, change):
        kept = self._watch.examiner.states.back_to(step)
        kept.state.put_back()
        self._left -= 1
        done = change() if change and self._left >= 0 else None
        if done is None:
            self._watch.model.stop_training = True
            self._stopped_at = kept.state
        return kept.step, done

    def end(self):
        """Undoes the step that was under way when training was stopped."""
        if self._stopped_at:
            self._stopped_at.put_back()

    def read_spikes(self) -> tuple:
        """Reads which steps were spikes.

        Returns:
            How many were since the last call, how many times as large as usual
            the last one was, and whether there are so many in a row that the
            next batch has to be looked at.
        """
        gates = gates_of(self._watch.model)
        with self._watch.counter_log.synchronized():
            read = [gate.read() for gate in gates] or [Spikes(0, 0, 0.0)]
        skipped, in_a_row, times = map(max, zip(*read, strict=True))
        new, self._told = skipped - self._told, skipped
        self._has_looked &= in_a_row > 0
        stuck = in_a_row >= _STREAK and not self._has_looked
        return new, times, stuck and not self._watch.several_workers

    def from_spikes(self) -> tuple | None:
        """Returns to a good state if the weights are to blame for spikes.

        They are if the batch that was kept with a state has usual gradients
        there, and a spike now. If not, the data have changed, and larger
        gradients count as usual from now on.

        Returns:
            The result of `run`, `None` if it stays.
        """
        self._has_looked = True
        model, gates = self._watch.model, gates_of(self._watch.model)
        limit = math.hypot(*(gate.limit() for gate in gates))
        to_blame = None
        for kept in reversed(self._watch.examiner.states.held):
            with kept.state.in_place():
                was_usual = _size(model, kept.batch) <= limit
            if was_usual and _size(model, kept.batch) > limit:
                to_blame = kept
                break
        for gate in gates:
            gate.end_streak(accept=to_blame is None)
        return to_blame and self._back_to(to_blame.step, lambda: _SAME)

    def _lower(self, numbers):
        factor = numbers["holds"] / numbers["learning_rate"]
        parts = updating(self._watch.model)
        rates = [learning_rate_object(part) for part in parts]
        if not all(
            isinstance(r, (keras.Variable, LearningRateSchedule)) for r in rates
        ):
            # A function of the user sets the rate; it cannot be lowered here.
            return None
        for part, rate in zip(parts, rates, strict=True):
            if isinstance(rate, LearningRateSchedule):
                part.learning_rate = LoweredSchedule(rate, factor)
            else:
                rate.assign(rate.value * factor)
        if any(isinstance(rate, LearningRateSchedule) for rate in rates):
            self._repairs.recompile()
        return f"a learning rate of {numbers['holds']:g}"

    def _clip(self, numbers):
        for part in updating(self._watch.model):
            part.global_clipnorm = numbers["clip"]
        self._repairs.recompile()
        return f"gradients clipped to a norm of {numbers['clip']:g}"


def _size(model, batch):
    """The norm of a batch's gradients in float32."""
    step = exact_step(model, batch, records=False)
    norms = [norm(to_array(x)) for x in step.gradients.values()]
    return math.hypot(*norms) / step.scale


_SAME = "the same settings, since the gradients there are as usual"

_CHANGES = {"learning_rate": Recovery._lower, "gradients": Recovery._clip}
