"""Finding the layers whose precision is at fault in one train step."""

import math

import numpy as np

from keras_mixprec.diagnosis.backward import (
    gradients_of_layers,
)
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.criterion import is_finite
from keras_mixprec.diagnosis.culprit import computes_low, layers_of
from keras_mixprec.diagnosis.scales import (
    best_scale_bits,
    lost,
    scale_in_use,
    scale_window,
)
from keras_mixprec.diagnosis.search import culprits_of
from keras_mixprec.diagnosis.state_check import StateCheck
from keras_mixprec.diagnosis.step_run import StepRun
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import DryStep
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.summary import costs


class Search:
    """The search for what makes a train step wrong in 16 bits.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the whole model in float32, at loss scale 1.
        compiled: Boolean, whether XLA compiles the model's step.

    Attributes:
        culprits: List of the `Culprit`s found.
        windows: Dict path -> `ScaleWindow` of the layers that are left in
            float16.
        scale_bits: Float. The loss scale that was found or given, as a power
            of two.
        errors: As in `Examination`, as the model is built.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        self._model = model
        self._data = data
        self._exact = exact
        self._compiled = compiled
        self.culprits = []
        self.windows = {}
        self.scale_bits: float | None = None
        self.errors = {}

    def run(self, scale_bits: float | None, effective):
        """Finds the culprits.

        Args:
            scale_bits: Float. The loss scale as a power of two, if it does
                not adapt itself; `None` if it does.
            effective: Function from a variable and its float32 gradient to
                whether the optimizer would move the variable by it.
        """
        windows = self._find_windows(effective)
        bits = scale_bits
        if bits is None:
            bits = self._best_bits(windows)
        run = StepRun(self._model, self._data, self._exact, self._compiled)
        run.bits, run.windows = bits, windows
        step = run.step(records=True)
        calls = run.low(step.calls)
        self.errors = layer_errors(calls, step, self._exact)
        # A step that is not finite says little about the state that it keeps.
        if is_finite(step):
            step = self._add_still(run, step)
        if run.wrong(step):
            # Layers whose gradients do not fit this scale are at fault
            # themselves.
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
        """The windows of the layers that stay in 16 bits."""
        low = {call.path for call in run.low(self._exact.calls)}
        return {path: own for path, own in windows.items() if path in low}

    def _add(self, run, culprits):
        self.culprits += culprits
        run.demoted = layers_of(self.culprits)

    def _add_still(self, run, step):
        """Adds layers whose variables stand still; returns the step then."""
        found = self._state_check(run).culprits(step)
        self._add(run, found)
        return run.step(records=True) if found else step

    def _state_check(self, run):
        return StateCheck(self._model, self._data, self._exact, run.demoted)

    def _spare_what_xla_ignores(self, run):
        """Drops those whose non-finite gradients a compiled step ignores.

        The gradient of a ReLU does, which op by op multiplies them by 0.
        """
        for culprit in [*self.culprits]:
            others = [c for c in self.culprits if c is not culprit]
            run.demoted = layers_of(others)
            if culprit.numbers.get("nonfinite_gradients") and not (
                run.wrong_in_xla()
            ):
                self.culprits = others
        self._add(run, [])

    def predict_scale_bits(self, effective) -> int:
        """Returns the loss scale that suits most of the model as it is.

        Args:
            effective: As for `run`.
        """
        return self._best_bits(self._find_windows(effective))

    def _best_bits(self, windows):
        possible = scale_in_use(self._model).possible
        return best_scale_bits(windows, costs(self._model), possible)

    def vanishing(self, bits: float, effective) -> list:
        """Returns the layers whose gradients a loss scale of `2**bits` loses.

        Paths, of those that are left in float16.

        Args:
            bits: Float.
            effective: As for `run`.
        """
        low = {path for path, own in self.windows.items() if bits < own.low}
        gradients = self._own_gradients(effective) if low else {}
        return [p for p in gradients if p in low and lost(gradients[p], bits)]

    def _find_windows(self, effective):
        """The `ScaleWindow` of each float16 layer's gradients in float32."""
        gradients = self._own_gradients(effective)
        return {path: scale_window(own) for path, own in gradients.items()}

    def _own_gradients(self, effective):
        low = [call for call in self._low(self._exact) if not call.nested]
        return gradients_of_layers(low, self._exact, effective)

    def _low(self, step):
        return [call for call in step.calls if computes_low(call.layer)]


def layer_errors(low: list, step: DryStep, exact: DryStep) -> dict:
    """Returns how far layers are off in a step, errors of others included.

    Args:
        low: List of the `LayerCall`s of `step` that compute in 16 bits.
        step: `DryStep` with its calls.
        exact: The same in float32, at loss scale 1.

    Returns:
        Dict from the names of calls to dicts from `"forward"` and
        `"backward"` to relative errors. The backward error is that of the
        gradients of the weights. Calls with inputs that are not finite are
        left out.
    """
    known = {call.name: call for call in exact.calls}
    errors: dict = {}
    for call in low:
        reference = known.get(call.name)
        if reference is None or nonfinite(_arrays(LayerReplay(call).inputs)):
            continue
        own = errors[call.name] = {}
        forward = _arrays(call.float_outputs)
        wide = _arrays(reference.float_outputs)
        if [a.shape for a in forward] == [a.shape for a in wide]:
            own["forward"] = relative_error(forward, wide)
        weights = [id(v) for v in call.layer.trainable_variables]
        weights = [w for w in weights if w in step.gradients]
        if weights and not call.nested:
            wide = [to_array(exact.gradients[w]) for w in weights]
            scaled = [to_array(step.gradients[w]) for w in weights]
            scale = np.float32(step.scale)
            back = relative_error([g / scale for g in scaled], wide)
            own |= {"backward": back} if math.isfinite(back) else {}
    return errors


def _arrays(tensors):
    return [to_array(x) for x in tensors]
