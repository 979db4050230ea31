"""Finds the layers whose precision is at fault in one train step."""

import math

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.cause import (
    check_backward,
    step_cause,
    window_fault,
)
from keras_mixprec.diagnosis.criterion import (
    RESULT,
    effective_update,
    is_finite,
    nonfinite,
    relative_error,
    step_criterion,
)
from keras_mixprec.diagnosis.culprit import Culprit, computes_low, layers_of
from keras_mixprec.diagnosis.scales import (
    best_scale_bits,
    lost,
    scale_in_use,
    scale_window,
)
from keras_mixprec.diagnosis.search import Run, culprits_of
from keras_mixprec.diagnosis.state_check import layers_that_stand_still
from keras_mixprec.diagnosis.step_errors import evidence
from keras_mixprec.numerics.arrays import to_array, to_arrays
from keras_mixprec.numerics.dry_step import DryStep, compiled_step, dry_step
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.summary import costs

# Before blaming a layer, the search moves a dynamic loss scale by these powers
# of two. The range of float16 spans 40 powers of two.
_OTHER_SCALES = (2, 4, 8, 16)


class StepRun(Run):
    """A train step in 16 bits, compared with the one in float32.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the batch in float32, at loss scale 1.
        compiled: Boolean, whether XLA compiles the model's step.

    Attributes:
        adapts: Boolean, whether the search may change the loss scale.
        windows: Dict from the path of a float16 layer to its `ScaleWindow`.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        criterion = step_criterion(model, data, exact)
        super().__init__(model, exact, compiled, criterion)
        self.adapts = False
        self.windows = {}
        self._data = data
        self._loss = exact.loss

    def take(self, *, records=False) -> DryStep:
        """Runs the step; see `Run`."""
        return self._at(self.bits, records=records)

    def step(self, *, records=False) -> DryStep:
        """Runs the step with the demoted layers in float32.

        Args:
            records: As for `take`.
        """
        with computing_in("float32", self.demoted):
            return self.take(records=records)

    def _at(self, bits, records=False):
        return dry_step(self.model, self._data, 2.0**bits, records=records)

    def _is_right(self, step):
        if self._criterion.fits(step):
            return True
        # If only gradients are wrong, a different loss scale may repair them.
        result = self._criterion.errors(step)[RESULT]
        return (
            self.adapts
            and result <= thresholds.LOSS_ERROR
            and self._other_scale(step) is not None
        )

    def compare(self, step):
        """Compares a step in 16 bits with the one in float32."""
        super().compare(step)
        self._loss = step.loss

    def compiled(self):
        """Runs the step as XLA computes it; see `Run`."""
        return compiled_step(self.model, self._data, 2.0**self.bits)

    def find_other_scale(self) -> bool:
        """Changes to the nearest loss scale that makes the step right, if any.

        Returns:
            True if a loss scale was found.
        """
        with computing_in("float32", self.demoted):
            found = self._other_scale(self.take())
        self.bits = self.bits if found is None else found
        return found is not None

    def _other_scale(self, step):
        """Returns the nearest loss scale that makes the step right, if any."""
        possible = scale_in_use(self.model).possible
        errors = self._criterion.errors(step)
        overflows = any(
            math.isinf(e) for part, e in errors.items() if part != RESULT
        )
        sign = -1 if overflows else 1
        for distance in _OTHER_SCALES:
            bits = self.bits + sign * distance
            if not possible[0] <= bits <= possible[-1]:
                break
            if self._criterion.fits(self._at(bits)):
                return bits
        return None

    def own_faults(self, low):
        """Yields the forward check, then the backward check."""
        yield from super().own_faults(low)
        if self.errors[RESULT] <= thresholds.LOSS_ERROR:
            yield self._own_backward_fault

    def _own_backward_fault(self, call):
        window = self.windows.get(call.path)
        if window and not window.holds(self.bits):
            return window_fault(window, self.bits, call)
        exact = self.exact_calls.get(call.name)
        if exact is None or call.nested:
            return None
        return check_backward(call, exact, self._compiled, self.bits)

    def cause(self, layers):
        """Returns why the step is not finite; see `Run`."""
        return step_cause(self.model, self._data, layers)

    def numbers(self):
        """Returns the error of the step."""
        if self.errors[RESULT] > thresholds.LOSS_ERROR:
            return {"loss": self._loss, "loss_in_float32": self._exact.loss}
        return {
            "gradient_error": max(self.errors.values()),
            "loss_scale_bits": self.bits,
        }


class Search:
    """The search for the layers that make a train step wrong in 16 bits.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the whole model in float32, at loss scale 1.
        compiled: Boolean, whether XLA compiles the model's step.

    Attributes:
        culprits: List of the `Culprit`s found.
        windows: Dict from the path of each layer that stays in float16 to its
            `ScaleWindow`.
        scale_bits: Float. The loss scale that the search found or was given, as
            a power of two.
        errors: As in `Examination`, in the model's own dtypes.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        self._model = model
        self._data = data
        self._exact = exact
        self._compiled = compiled
        self._effective = effective_update(model)
        self.culprits = []
        self.windows = {}
        self.scale_bits: float | None = None
        self.errors = {}

    def run(self, scale_bits: float | None):
        """Finds the culprits.

        Args:
            scale_bits: Float. The loss scale as a power of two, or `None` for a
                dynamic loss scale.
        """
        windows = self._find_windows()
        bits = scale_bits
        if bits is None:
            bits = self._best_bits(windows)
        run = StepRun(self._model, self._data, self._exact, self._compiled)
        run.bits, run.windows = bits, windows
        step = run.step(records=True)
        calls = run.low(step.calls)
        self.errors = layer_errors(calls, step, self._exact)
        # Only a finite step shows whether variables still change.
        if is_finite(step):
            step = self._add_still(run, step)
        if run.wrong(step):
            # If the best loss scale does not suit a layer, the layer is at
            # fault, and no other loss scale repairs the step.
            suits = all(window.holds(bits) for window in windows.values())
            run.adapts = scale_bits is None and suits
            if not run.adapts or not run.find_other_scale():
                self._add(run, culprits_of(run, run.low(step.calls)))
            if self._compiled:
                self._spare_what_xla_ignores(run)
            if scale_bits is None and self.culprits:
                run.bits = self._best_bits(self._left(windows, run))
            step = run.step()
            if run.adapts and run.wrong(step) and run.find_other_scale():
                step = run.step()
            step = self._add_still(run, step)
        self.scale_bits = run.bits
        left = self._left(windows, run)
        self.windows = {p: w for p, w in left.items() if w.holds(run.bits)}

    def _left(self, windows, run):
        """Returns the windows of the layers that stay in 16 bits."""
        low = {call.path for call in run.low(self._exact.calls)}
        return {path: own for path, own in windows.items() if path in low}

    def _add(self, run, culprits):
        self.culprits += culprits
        run.demoted = layers_of(self.culprits)

    def _add_still(self, run, step):
        """Adds layers whose variables stop changing, and returns a new step."""
        found = layers_that_stand_still(
            self._model, self._data, self._exact, step
        )
        self._add(run, found)
        return run.step(records=True) if found else step

    def _spare_what_xla_ignores(self, run):
        """Drops culprits whose non-finite gradients a compiled step ignores.

        A ReLU is an example. Op by op, its gradient multiplies an infinity by 0
        and gives NaN, but a compiled step selects 0.
        """
        for culprit in [*self.culprits]:
            others = [c for c in self.culprits if c is not culprit]
            run.demoted = layers_of(others)
            if culprit.numbers.get("nonfinite_gradients") and not (
                run.wrong_in_xla()
            ):
                self.culprits = others
        self._add(run, [])

    def predict_scale_bits(self) -> int:
        """Returns the loss scale that suits most of the model as it is."""
        return self._best_bits(self._find_windows())

    def _best_bits(self, windows):
        possible = scale_in_use(self._model).possible
        return best_scale_bits(windows, costs(self._model), possible)

    def vanishing(self, bits: float) -> list:
        """Returns the paths of float16 layers whose gradients underflow.

        Args:
            bits: Float. The loss scale, as a power of two.
        """
        low = {path for path, own in self.windows.items() if bits < own.low}
        gradients = self._own_gradients() if low else {}
        return [p for p in gradients if p in low and lost(gradients[p], bits)]

    def _find_windows(self):
        """Returns the `ScaleWindow` of each float16 layer."""
        gradients = self._own_gradients()
        return {path: scale_window(own) for path, own in gradients.items()}

    def _own_gradients(self):
        """Returns the gradients of each float16 layer's outputs and weights.

        The keys are paths. If a layer has weights but the step would change
        none of them, its list is empty.
        """
        found = {}
        for call in self._exact.calls:
            low = computes_low(call.layer) and not call.nested
            if low and call.layer.compute_dtype == "float16":
                own = self._gradients_of(call)
                found.setdefault(call.path, []).extend(own)
        return found

    def _gradients_of(self, call):
        weights = [
            (v, to_array(self._exact.gradients[id(v)]))
            for v in call.layer.trainable_variables
            if id(v) in self._exact.gradients
        ]
        moving = [g for v, g in weights if self._effective(v, g)]
        if weights and not moving:
            return []
        return moving + to_arrays(c for c in call.cotangents if c is not None)


def layer_errors(low: list, step: DryStep, exact: DryStep) -> dict:
    """Returns each layer's errors in a step, including those of other layers.

    Args:
        low: List of the `LayerCall`s of `step` that compute in 16 bits.
        step: `DryStep` with its calls.
        exact: The same step in float32, at loss scale 1.

    Returns:
        Dict from the names of calls to dicts from `"forward"` and
        `"backward"` to relative errors. The backward error is the error of the
        gradients of the weights. Calls with non-finite inputs are left out.
    """
    known = {call.name: call for call in exact.calls}
    errors: dict = {}
    for call in low:
        reference = known.get(call.name)
        if reference is None or nonfinite(to_arrays(LayerReplay(call).inputs)):
            continue
        own = errors[call.name] = {}
        forward = to_arrays(call.float_outputs)
        wide = to_arrays(reference.float_outputs)
        if [a.shape for a in forward] == [a.shape for a in wide]:
            own["forward"] = relative_error(forward, wide)
        weights = [id(v) for v in call.layer.trainable_variables]
        weights = [w for w in weights if w in step.gradients]
        if weights and not call.nested:
            wide = to_arrays(exact.gradients[w] for w in weights)
            scaled = to_arrays(step.gradients[w] for w in weights)
            scale = np.float32(step.scale)
            back = relative_error([g / scale for g in scaled], wide)
            own |= {"backward": back} if math.isfinite(back) else {}
    return errors


def other_layers_at_fault(
    run: StepRun, others: list, adapts: bool
) -> Culprit | None:
    """Returns the fault of 16-bit layers and losses outside the model.

    Examples are the feature network of a loss, and a layer that is a global
    variable. A plan cannot name such layers.

    Args:
        run: `StepRun` with the culprits in the model demoted.
        others: List of such layers and losses. If they compute in float32, the
            step is right.
        adapts: Boolean, whether the loss scale is dynamic.
    """
    other = others[0]
    if isinstance(other, keras.losses.Loss):
        numbers = {"narrow_loss": other.name, "dtype": other.dtype}
    else:
        numbers = {"not_held": other.name, "dtype": other.compute_dtype}
    try:
        if not run.wrong(run.step()) or (adapts and run.find_other_scale()):
            return None
    except active.replay().REFUSALS as error:
        numbers |= evidence(error)
        return Culprit(None, [], "unsupported", None, numbers)
    fault = run.fault(None, [])
    return fault._replace(numbers=numbers | fault.numbers)
