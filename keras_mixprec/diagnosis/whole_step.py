"""Whether a whole step is as good as in float32, and what makes it wrong."""

import math

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.backward import check_backward
from keras_mixprec.diagnosis.compare import nonfinite
from keras_mixprec.diagnosis.culprit import Culprit, rounded_integers
from keras_mixprec.diagnosis.end_to_end import Errors, Reference
from keras_mixprec.diagnosis.forward import check_forward
from keras_mixprec.diagnosis.loss_fault import fault_behind, step_fault
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.smallest_set import instability, smallest_set
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import (
    DryStep,
    compiled_step,
    dry_step,
    exact_step,
)
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.rounding import jittered
from keras_mixprec.policies.layers import MODEL_PATH

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

    def fault_behind(self, replay, known) -> tuple[str, str]:
        """Returns what is not finite behind a layer; see `fault_behind`."""
        layers = [replay.call.layer]
        return fault_behind(replay, known, self._model, self._data, layers)

    def fault(self, layers: list) -> tuple[str, str] | None:
        """Returns what is not finite without the layers; see `step_fault`."""
        return step_fault(self._model, self._data, layers)

    def errors(self, demoted: list, bits: float) -> Errors:
        """Returns how far the step is off in what is resolved.

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
        except active.replay().REFUSALS:
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
            and self.wrong_when_compiled(demoted, bits)
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

    def wrong_when_compiled(self, demoted: list, bits: float) -> bool:
        """Whether it is wrong as XLA computes it, if that compiles the model.

        Args:
            demoted: As for `step`.
            bits: As for `step`.
        """
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


def fault_of_errors(errors: Errors) -> tuple[str, str]:
    """Returns the kind and the direction of what makes a step wrong.

    Args:
        errors: `Errors` of the step.
    """
    forward = errors.loss > thresholds.LOSS_ERROR
    direction = "forward" if forward else "backward"
    overflows = math.inf in errors
    kind = f"{direction}_overflow" if overflows else "precision_loss"
    return kind, direction


class WholeSearch:
    """Seeks the smallest set of layers that the step is right without.

    Args:
        whole: `WholeStep`, wrong with the layers that are demoted so far.
        bits: Float. The loss scale as a power of two.
        demoted: List of the layers that are demoted so far.
        record: Function of a list of demoted layers that returns a `DryStep`
            in which every layer is given the cotangents of float32.
        exact_calls: Dict from names to the `LayerCall`s of the float32 step.
        compiled: Boolean. Whether XLA compiles the model's step.
    """

    def __init__(
        self, whole: WholeStep, bits, demoted, record, exact_calls, compiled
    ):
        self._whole = whole
        self._bits = bits
        self._demoted = list(demoted)
        self._record = record
        self._exact_calls = exact_calls
        self._compiled = compiled
        self._errors = whole.errors(self._demoted, bits)

    def culprits(self, model, low: list) -> list[Culprit]:
        """Returns what is to blame, none if it is rounding everywhere.

        Args:
            model: The `keras.Model`, which may itself compute something where
                no layer does.
            low: List of the `LayerCall`s of a step that compute in 16 bits,
                innermost first.
        """
        ranked = [path for path in self._ranked(low) if path != MODEL_PATH]
        layers = {call.path: call.layer for call in low} | {MODEL_PATH: model}
        found = self._smallest(ranked, layers)
        if found is None:
            found = self._smallest([MODEL_PATH, *ranked], layers)
        if found is not None:
            in_order = [path for path in layers if path in found]
            return [self._culprit(path, in_order, layers) for path in in_order]
        return [self._outside(None, [])] if self._overflows else []

    @property
    def _overflows(self):
        return math.inf in self._errors

    def _smallest(self, ranked, layers):
        def fits(paths):
            wide = [*self._demoted, *(layers[path] for path in paths)]
            return self._whole.right(wide, self._bits)

        return smallest_set(ranked, fits)

    def _ranked(self, low):
        """Paths, that first which is most likely to blame.

        What is finite but wrong may be so by the roundings of all layers, so
        only those that round badly, and what hands on to the loss, can be to
        blame for it.
        """
        keys = {}
        for order, call in enumerate(low):
            own = self._trigger(call)
            doubtful = own >= thresholds.NEGLIGIBLE
            last = not call.nested and order >= len(low) - 2
            if doubtful or last or self._overflows:
                key = (_finite(call), not doubtful, call.nested, -own, order)
                keys[call.path] = min(key, keys.get(call.path, key))
        return sorted(keys, key=keys.get)

    def _trigger(self, call):
        exact = self._exact_calls.get(call.name)
        if exact is None:
            return 0.0
        if _rounded(exact, call):
            return 1.0
        with computing_in("float32", self._demoted):
            return instability(exact, 2.0**self._bits)

    def _culprit(self, path, found, layers):
        """What is wrong with one of them, with the others repaired."""
        others = [layers[other] for other in found if other != path]
        demoted = [*self._demoted, *others]
        step = self._record(demoted)
        with computing_in("float32", demoted):
            for call in [c for c in step.calls if c.path == path]:
                culprit = self._own_fault(call)
                if culprit is not None:
                    return culprit._replace(layers=[call.layer])
            if path == MODEL_PATH:
                return self._outside(path, [layers[path]])
            fault = self._fault(call)
        rounded = _rounded(self._exact_calls[call.name], call)
        if fault[0] == "forward_overflow":
            rounded = {}  # Which is not what makes it infinite.
        elif rounded:
            fault = "precision_loss", "forward"
        return Culprit(path, [call.layer], *fault, self._numbers() | rounded)

    def _own_fault(self, call):
        exact = self._exact_calls.get(call.name)
        _, culprit = check_forward(call, None, self._compiled, True)
        if culprit is None and exact is not None and not call.nested:
            _, culprit = check_backward(
                call, exact, self._compiled, self._bits, True
            )
        return culprit

    def _fault(self, call):
        if self._overflows and math.isfinite(self._errors.loss):
            fault = self._whole.fault([call.layer])
            return fault or ("backward_overflow", "backward")
        if self._overflows:
            known = self._exact_calls.get(call.name)
            replay = LayerReplay(call, self._compiled)
            return self._whole.fault_behind(replay, known)
        fault = self._whole.fault([call.layer])
        return fault or fault_of_errors(self._errors)

    def _outside(self, path, layers):
        """The code outside of layers, such as that of the loss."""
        fault = layers and self._whole.fault(layers)
        fault = fault or fault_of_errors(self._errors)
        return Culprit(path, layers, *fault, self._numbers())

    def _numbers(self):
        return {
            "loss_error": self._errors.loss,
            "gradient_error": self._errors.gradient,
            "loss_scale_bits": self._bits,
        }


def _finite(call):
    tensors = [*LayerReplay(call).inputs, *call.float_outputs]
    return not nonfinite([to_array(x) for x in tensors])


def _rounded(exact, call):
    """Integers, such as ids, that the cast to the layer's dtype rounds."""
    inputs = LayerReplay(exact).cast_inputs
    return rounded_integers(inputs, call.layer.compute_dtype)
