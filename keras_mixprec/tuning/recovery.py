"""Returns to the last good state, with what made training diverge changed."""

from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_mixprec.keras_internals import learning_rate_object
from keras_mixprec.numerics.rehearsal import updating
from keras_mixprec.verdict_kinds import LOST


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
        session: The `Session`.
        repairs: `Repairs` of the model.
        most: Int. How often it may return.
    """

    def __init__(self, session, repairs, most: int):
        self._session = session
        self._repairs = repairs
        self._left = most
        self._stopped_at: Any = None

    def helps(self, examination) -> bool:
        """Whether nothing but another state helps against what was found."""
        lost = any(
            verdict.kind in LOST and "not_finite" not in verdict.numbers
            for verdict, _ in examination.findings
        )
        return lost and bool(self._session.examiner.states.held)

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
        session = self._session
        kept = session.examiner.states.back_to(numbers.get("since"))
        kept.state.put_back()
        self._left -= 1
        change = _CHANGES.get(numbers.get("cause", ""))
        done = change(self, numbers) if change and self._left >= 0 else None
        if done is None:
            session.model.stop_training = True
            self._stopped_at = kept.state
        return kept.step, done

    def end(self):
        """Undoes the step that was under way when training was stopped."""
        if self._stopped_at:
            self._stopped_at.put_back()

    def _lower(self, numbers):
        factor = numbers["holds"] / numbers["learning_rate"]
        parts = updating(self._session.model)
        rates = [learning_rate_object(part) for part in parts]
        if not all(
            isinstance(r, (keras.Variable, LearningRateSchedule)) for r in rates
        ):
            return None  # Only the user's own function knows it.
        for part, rate in zip(parts, rates, strict=True):
            if isinstance(rate, LearningRateSchedule):
                part.learning_rate = LoweredSchedule(rate, factor)
            else:
                rate.assign(rate.value * factor)
        if any(isinstance(rate, LearningRateSchedule) for rate in rates):
            self._repairs.recompile()
        return f"a learning rate of {numbers['holds']:g}"

    def _clip(self, numbers):
        for part in updating(self._session.model):
            part.global_clipnorm = numbers["clip"]
        self._repairs.recompile()
        return f"gradients clipped to a norm of {numbers['clip']:g}"


_CHANGES = {"learning_rate": Recovery._lower, "gradients": Recovery._clip}
