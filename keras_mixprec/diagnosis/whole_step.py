"""Whether a step in 16 bits, as a whole, is as good as in float32."""

import math

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.end_to_end import Errors, Reference
from keras_mixprec.diagnosis.loss_fault import fault_behind
from keras_mixprec.diagnosis.scale_in_use import scale_in_use
from keras_mixprec.numerics.dry_step import (
    DryStep,
    compiled_step,
    dry_step,
    exact_step,
)
from keras_mixprec.numerics.dtypes import computing_in
from keras_mixprec.numerics.jitter import jittered

# Powers of two by which another loss scale is tried, before a layer is blamed
# for what a scale that adapts itself would find by itself: float16's gradients
# span 40 of them.
_OTHER_SCALES = (2, 4, 8, 16)


class WholeStep:
    """Compares real steps in 16 bits with the one in float32.

    Each layer's gradients come from the cotangents that really arrive, errors
    of the layers after it and all.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1.
        compiled: Boolean. Whether XLA compiles the model's step.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        self._model = model
        self._data = data
        self._compiled = compiled
        self._reference = Reference(model, data, exact)

    def step(self, demoted: list, bits: float) -> DryStep:
        """Runs the step, without a record of the layers' calls.

        Args:
            demoted: List of the layers that compute in float32.
            bits: Float. The loss scale as a power of two.
        """
        with computing_in("float32", demoted):
            return dry_step(self._model, self._data, 2.0**bits, records=False)

    def fault_behind(self, twin, known, calls) -> tuple[str, str]:
        """Returns what is not finite behind a layer; see `fault_behind`."""
        return fault_behind(twin, known, self._model, self._data, calls)

    def errors(self, demoted: list, bits: float) -> Errors:
        """Returns how far the step is off in what is settled.

        Args:
            demoted: As for `step`.
            bits: As for `step`.
        """
        return self._reference.errors(self.step(demoted, bits))

    def right(self, demoted: list, bits: float) -> bool:
        """Whether the step runs and is as good as in float32.

        Args:
            demoted: As for `step`.
            bits: As for `step`.
        """
        try:
            return self._reference.is_like(self.step(demoted, bits))
        # Each backend has a type of its own for dtypes that do not mix.
        except Exception:
            return False

    def wrong(self, step: DryStep, demoted: list, bits: float) -> bool:
        """Whether a step is wrong, and not by any rounding.

        Args:
            step: What `step` returned for the same arguments.
            demoted: As for `step`.
            bits: As for `step`.
        """
        return (
            not self._reference.is_like(step)
            and self._wrong_when_compiled(demoted, bits)
            and self._wrong_however_rounded(demoted, bits)
        )

    def other_scale(self, demoted: list, bits: float) -> float | None:
        """Returns the nearest loss scale that the step is right at, if any.

        Args:
            demoted: As for `step`.
            bits: As for `step`.
        """
        possible = scale_in_use(self._model).possible
        sign = -1 if math.inf in self.errors(demoted, bits) else 1
        wrong = bits
        for distance in _OTHER_SCALES:
            other = bits + sign * distance
            if not possible[0] <= other <= possible[-1]:
                break
            if self.right(demoted, other):
                return self._nearest(demoted, other, wrong)
            wrong = other
        return None

    def _nearest(self, demoted, right, wrong):
        """The loss scale nearest to a wrong one that the step is right at."""
        while abs(wrong - right) > 1:
            middle = (right + wrong) // 2
            if self.right(demoted, middle):
                right = middle
            else:
                wrong = middle
        return right

    def _wrong_when_compiled(self, demoted, bits):
        if not self._compiled:
            return True
        with computing_in("float32", demoted):
            step = compiled_step(self._model, self._data, 2.0**bits)
        return not self._reference.is_like(step)

    def _wrong_however_rounded(self, demoted, bits):
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                exact = exact_step(self._model, self._data, records=False)
                low = self.step(demoted, bits)
            if self._reference.compare(low, exact).within(
                thresholds.LOSS_ERROR, thresholds.BACKWARD_ERROR
            ):
                return False
        return True
