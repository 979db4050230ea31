"""Returns to the last good state and removes the cause of a divergence."""

import math
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_mixprec.diagnosis.causes import is_good
from keras_mixprec.diagnosis.criterion import norm
from keras_mixprec.keras_internals import learning_rate_object
from keras_mixprec.loss_scaling.spikes import Spikes, gates_of
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.rehearsal import updating
from keras_mixprec.verdict_kinds import LOST

# After this many gradient spikes in a row, the cause may be the weights, not
# the data.
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
        """Creates a schedule from the result of `get_config`."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["factor"])


class Recovery:
    """Returns to a good state, and removes the cause of the divergence.

    Args:
        watch: The `Watch`.
        repairs: `Repairs` of the model.
        most: Int. The maximum number of returns.
    """

    def __init__(self, watch, repairs, most: int):
        self._watch = watch
        self._repairs = repairs
        self._left = most
        self._stopped_at: Any = None
        self._told = 0
        self._has_looked = False

    def helps(self, examination) -> bool:
        """Returns whether a return to a good state is needed and possible."""
        lost = any(
            verdict.kind in LOST and "not_finite" not in verdict.numbers
            for verdict, _ in examination.findings
        )
        return lost and bool(self._watch.examiner.states.held)

    def run(self, examination) -> tuple:
        """Returns to a good state.

        Training stops there if the cause of the divergence cannot be removed.

        Args:
            examination: `Examination`.

        Returns:
            The step of this state, and the settings with which training
            continues, or `None` if it stops.
        """
        model, numbers = self._watch.model, {}
        for finding in examination.findings:
            numbers = finding.verdict.numbers | numbers
        if "cause" in numbers:
            return self._back_to(numbers.get("since"), numbers)
        held = reversed(self._watch.examiner.states.held)
        good = next((own.step for own in held if is_good(model, own)), None)
        return self._back_to(good, {} if good is None else _GOOD)

    def _back_to(self, step, numbers):
        kept = self._watch.examiner.states.back_to(step)
        kept.state.put_back()
        # Reset the metrics of the epoch, because they contain the steps that
        # are undone.
        for metric in self._watch.model.metrics:
            metric.reset_state()
        self._left -= 1
        change = _CHANGES.get(numbers.get("cause"))
        done = change(self, numbers) if change and self._left >= 0 else None
        if done is None:
            self._watch.model.stop_training = True
            self._stopped_at = kept.state
        return kept.step, done

    def end(self):
        """Undoes the step that was running when training was stopped."""
        if self._stopped_at:
            self._stopped_at.put_back()

    def read_spikes(self) -> tuple:
        """Reads the counts of gradient spikes.

        Returns:
            The number of new spikes, the gradient norm of the last one as a
            multiple of the largest norm before, and whether to test the weights
            because of a streak.
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
        """Returns to a good state if the weights cause the spikes.

        The weights are the cause if an old batch is a spike now, but had normal
        gradients in a good state. If not, the data have changed, and larger
        gradients count as normal from now on.

        Returns:
            The result of `run`, or `None` if the model keeps its state.
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
        return to_blame and self._back_to(to_blame.step, _GOOD)

    def _continue(self, numbers):
        return "the same settings, since training does not fail from there"

    def _lower(self, numbers):
        factor = numbers["holds"] / numbers["learning_rate"]
        parts = updating(self._watch.model)
        rates = [learning_rate_object(part) for part in parts]
        if not all(
            isinstance(r, (keras.Variable, LearningRateSchedule)) for r in rates
        ):
            # If a user's own function sets the learning rate, the rate cannot
            # be scaled.
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
    """Returns the norm of all gradients of a batch in float32."""
    step = exact_step(model, batch, records=False)
    norms = [norm(to_array(x)) for x in step.gradients.values()]
    return math.hypot(*norms) / step.scale


# The finding if the weights were the cause of the divergence, and no setting
# has to change.
_GOOD = {"cause": "state"}

_CHANGES = {
    "state": Recovery._continue,
    "learning_rate": Recovery._lower,
    "gradients": Recovery._clip,
}
