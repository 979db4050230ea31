"""A train step in 16 bits: whether it is as good as in float32, and why."""

import math

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.backward import check_backward, classify_window
from keras_mixprec.diagnosis.culprit import Fault, rounded_inputs
from keras_mixprec.diagnosis.end_to_end import Errors, Reference, is_finite
from keras_mixprec.diagnosis.loss_fault import fault_behind, step_fault
from keras_mixprec.diagnosis.run import Run
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.smallest_set import instability
from keras_mixprec.numerics.dry_step import (
    DryStep,
    compiled_step,
    dry_step,
    exact_step,
)
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.rounding import jittered

# Powers of two by which another loss scale is tried, before a layer is blamed
# for what a scale that adapts itself would find by itself: float16's gradients
# span 40 of them.
_OTHER_SCALES = (2, 4, 8, 16)


class StepRun(Run):
    """A train step in 16 bits, compared with the one in float32.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1.
        compiled: Boolean. Whether XLA compiles the model's step.

    Attributes:
        bits: Float. The loss scale as a power of two.
        adapts: Boolean. Whether it may be another one.
        windows: Dict from the path of a float16 layer to its `ScaleWindow`.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        super().__init__(model, exact, compiled)
        self.bits, self.adapts = 0.0, False
        self.windows = {}
        self._data = data
        self._reference = Reference(model, data, exact)
        self._errors, self._loss = Errors(0.0, 0.0), exact.loss

    def step(self, *, records=False) -> DryStep:
        """Runs the step as it is, with errors of all layers.

        Args:
            records: Boolean. Whether to record the layers' calls.
        """
        with computing_in("float32", self.demoted):
            return self._step(records=records)

    def _step(self, known=(), records=False):
        scale = 2.0**self.bits
        return dry_step(self.model, self._data, scale, known, records=records)

    def _recorded(self):
        return self._step(self.exact_calls, True)

    def _is_right(self):
        step = self._step()
        if self._reference.is_like(step):
            return True
        # Of gradients alone another loss scale may be to blame.
        return (
            self.adapts
            and self._reference.errors(step).loss <= thresholds.LOSS_ERROR
            and self._other_scale(step) is not None
        )

    def wrong(self, step: DryStep) -> bool:
        """Whether a step is wrong, and not by any rounding or by chance.

        Args:
            step: What `step` returned.
        """
        # First: what roundings do takes steps that a sound one need not wait
        # for.
        if self._reference.is_like(step):
            return False
        self._note_errors(step)
        return (
            not self._is_chance(step)
            and self.wrong_when_compiled()
            and self._wrong_however_rounded()
        )

    def _note_errors(self, step):
        self._errors, self._loss = self._reference.errors(step), step.loss
        self.error = max(self._errors)

    def _is_chance(self, step):
        """Whether float32 may only have drawn other random numbers.

        Of generators that are not Keras', JAX' draw others in each dtype.
        """
        return is_finite(step) and any(
            LayerReplay(c).draws_by_itself()
            for c in self.low(self._exact.calls)
        )

    def wrong_when_compiled(self) -> bool:
        """Whether it is wrong as XLA computes it, if that compiles it."""
        if not self._compiled:
            return True
        with computing_in("float32", self.demoted):
            step = compiled_step(self.model, self._data, 2.0**self.bits)
        return not self._reference.is_like(step)

    def _wrong_however_rounded(self):
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self.model, seed):
                exact = exact_step(self.model, self._data, records=False)
                low = self.step()
            if self._reference.compare(low, exact).within(
                thresholds.LOSS_ERROR, thresholds.BACKWARD_ERROR
            ):
                return False
        return True

    def find_other_scale(self) -> bool:
        """Takes the nearest loss scale at which the step is right, if any.

        Returns:
            Boolean. Whether there is one.
        """
        with computing_in("float32", self.demoted):
            found = self._other_scale(self._step())
        self.bits = self.bits if found is None else found
        return found is not None

    def _other_scale(self, step):
        """A loss scale that the step is right at, which it is not at this."""
        possible = scale_in_use(self.model).possible
        errors = self._reference.errors(step)
        sign = -1 if math.isinf(errors.gradient) else 1
        wrong = self.bits
        for distance in _OTHER_SCALES:
            bits = self.bits + sign * distance
            if not possible[0] <= bits <= possible[-1]:
                break
            if self._is_right_at(bits):
                return self._nearest(bits, wrong)
            wrong = bits
        return None

    def _nearest(self, right, wrong):
        """The loss scale nearest to a wrong one that is right."""
        while abs(wrong - right) > 1:
            middle = (right + wrong) // 2
            if self._is_right_at(middle):
                right = middle
            else:
                wrong = middle
        return right

    def _is_right_at(self, bits):
        step = dry_step(self.model, self._data, 2.0**bits, records=False)
        return self._reference.is_like(step)

    # What is wrong.

    def own_error(self, call):
        """Returns the error on float32's inputs, per what it may be."""
        exact = self.exact_calls.get(call.name)
        if exact is None:
            return 0.0
        if rounded_inputs(exact):
            return 1.0
        with computing_in("float32", self.demoted):
            return instability(exact, 2.0**self.bits)

    def own_faults(self, low):
        """Yields what finds faults forward, then backward."""
        yield from super().own_faults(low)
        self._note_errors(low)
        if self._errors.loss <= thresholds.LOSS_ERROR:
            yield self._own_backward_fault

    def _own_backward_fault(self, call):
        window = self.windows.get(call.path)
        if window and not window.holds(self.bits):
            return classify_window(window, self.bits, call)
        exact = self.exact_calls.get(call.name)
        if exact is None or call.nested:
            return None
        return check_backward(call, exact, self._compiled, self.bits)

    def fault(self, layers) -> Fault:
        """Returns what makes the step wrong; see `Run`."""
        found = None
        if layers:
            found = step_fault(self.model, self._data, layers)
        return found or fault_of_errors(self._errors)

    def fault_behind(self, call):
        """Returns what is wrong behind a layer; see `Run`."""
        layers = [call.layer]
        if math.isfinite(self._errors.loss):
            found = step_fault(self.model, self._data, layers)
            if found or not math.isinf(self.error):
                return found or fault_of_errors(self._errors)
            return Fault("backward_overflow", "backward")
        replay = LayerReplay(call, self._compiled)
        known = self.exact_calls.get(call.name)
        return fault_behind(replay, known, self.model, self._data, layers)

    def numbers(self):
        """Returns how far the step is off."""
        if self._errors.loss > thresholds.LOSS_ERROR:
            return {"loss": self._loss, "loss_in_float32": self._exact.loss}
        return {
            "gradient_error": self._errors.gradient,
            "loss_scale_bits": self.bits,
        }


def fault_of_errors(errors: Errors) -> Fault:
    """Returns what makes a step wrong.

    Args:
        errors: `Errors` of the step.
    """
    forward = errors.loss > thresholds.LOSS_ERROR
    direction = "forward" if forward else "backward"
    overflows = math.inf in errors
    kind = f"{direction}_overflow" if overflows else "precision_loss"
    return Fault(kind, direction)
