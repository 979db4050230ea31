"""A train step in 16 bits: whether it is as good as in float32, and why."""

import math

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.backward import check_backward, classify_window
from keras_mixprec.diagnosis.criterion import Errors, step_criterion
from keras_mixprec.diagnosis.culprit import Fault
from keras_mixprec.diagnosis.loss_fault import fault_behind, step_fault
from keras_mixprec.diagnosis.run import Run
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.numerics.dry_step import (
    DryStep,
    compiled_step,
    dry_step,
)
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import LayerReplay

# Powers of two by which the search moves a loss scale that adapts, before it
# blames a layer. The gradients of float16 span 40 of them.
_OTHER_SCALES = (2, 4, 8, 16)


class StepRun(Run):
    """A train step in 16 bits, compared with the one in float32.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1.
        compiled: Boolean, whether XLA compiles the model's step.

    Attributes:
        adapts: Boolean, whether it may be another one.
        windows: Dict from the path of a float16 layer to its `ScaleWindow`.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        criterion = step_criterion(model, data, exact)
        super().__init__(model, exact, compiled, criterion)
        self.adapts = False
        self.windows = {}
        self._data = data
        self._errors, self._loss = Errors(0.0, 0.0), exact.loss

    def step(self, *, records=False) -> DryStep:
        """Runs the step as it is, with errors of all layers.

        Args:
            records: Boolean, whether to record the layers' calls.
        """
        with computing_in("float32", self.demoted):
            return self._step(records=records)

    def _step(self, records=False):
        return dry_step(self.model, self._data, 2.0**self.bits, records=records)

    def _recorded(self):
        return self._step(records=True)

    def _is_right(self):
        step = self._step()
        if self._criterion.fits(step):
            return True
        # Another loss scale may mend gradients.
        return (
            self.adapts
            and self._errors_of(step).loss <= thresholds.LOSS_ERROR
            and self._other_scale(step) is not None
        )

    def _errors_of(self, step):
        return Errors.of(self._criterion.errors(step))

    def _note_errors(self, step):
        self._errors, self._loss = self._errors_of(step), step.loss
        self.error = max(self._errors)

    def wrong_in_xla(self) -> bool:
        """Returns whether it is wrong as XLA computes it."""
        with computing_in("float32", self.demoted):
            step = compiled_step(self.model, self._data, 2.0**self.bits)
        return not self._criterion.fits(step)

    def find_other_scale(self) -> bool:
        """Takes the nearest loss scale that makes the step right, if any.

        Returns:
            Boolean, whether there is one.
        """
        with computing_in("float32", self.demoted):
            found = self._other_scale(self._step())
        self.bits = self.bits if found is None else found
        return found is not None

    def _other_scale(self, step):
        """A loss scale that the step is right at, which it is not at this."""
        possible = scale_in_use(self.model).possible
        overflows = math.isinf(self._errors_of(step).gradient)
        sign = -1 if overflows else 1
        for distance in _OTHER_SCALES:
            bits = self.bits + sign * distance
            if not possible[0] <= bits <= possible[-1]:
                break
            if self._is_right_at(bits):
                return bits
        return None

    def _is_right_at(self, bits):
        step = dry_step(self.model, self._data, 2.0**bits, records=False)
        return self._criterion.fits(step)

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
            return found or fault_of_errors(self._errors)
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
