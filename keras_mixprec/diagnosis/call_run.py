"""Calls of a model without a loss in 16 bits, compared with float32."""

import math

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import pass_error, relative_error
from keras_mixprec.diagnosis.culprit import Culprit, Fault, layers_of
from keras_mixprec.diagnosis.forward import range_kind
from keras_mixprec.diagnosis.run import Run
from keras_mixprec.diagnosis.search import culprits_of
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import (
    Cause,
    LayerReplay,
    cause_of_nonfinite,
    nonfinite_places,
)
from keras_mixprec.numerics.rounding import jittered


class CallRun(Run):
    """What `predict` does with one batch.

    Args:
        prediction: `Prediction`.
        exact: `ForwardPass` of it in float32.
        compiled: Boolean. Whether XLA compiles the call.
    """

    def __init__(self, prediction, exact, compiled: bool):
        super().__init__(prediction.model, exact, compiled)
        self._prediction = prediction

    def culprits(self, known: list[Culprit]) -> list[Culprit]:
        """Returns what is to blame if the outputs are wrong.

        Args:
            known: List of `Culprit`, those that are known before, with which
                the list begins.
        """
        self.demoted = layers_of(known)
        low = self.record([])
        self.error = pass_error(low, self._exact)
        wrong = self.error > thresholds.LOSS_ERROR
        if not wrong or self._right_in_xla() or not self._however_rounded():
            return known
        return [*known, *culprits_of(self, self.low(low.calls))]

    def _recorded(self):
        return self._prediction.run()

    def _is_right(self):
        low = self._prediction.run(records=False)
        return pass_error(low, self._exact) <= thresholds.LOSS_ERROR

    def _however_rounded(self):
        """Whether it is wrong with weights that are off by half an ulp, too."""
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self.model, seed):
                exact = self._prediction.exact(records=False)
                with computing_in("float32", self.demoted):
                    low = self._prediction.run(records=False)
            error = pass_error(low, exact)
            moved = pass_error(exact, self._exact)
            noise = max(thresholds.LOSS_ERROR, thresholds.BEYOND_NOISE * moved)
            if error <= noise and math.isfinite(error):
                return False
        return True

    def _right_in_xla(self):
        if not self._compiled:
            return False
        with computing_in("float32", self.demoted):
            low = self._prediction.compiled()
        exact = self._prediction.compiled_exact()
        return pass_error(low, exact) <= thresholds.LOSS_ERROR

    def own_error(self, call):
        """Returns the error on float32's inputs, per what it may be."""
        exact = self.exact_calls.get(call.name)
        if exact is None:
            return 0.0
        replay = LayerReplay(exact)
        error = relative_error(replay.forward(), replay.forward("float32"))
        return error / thresholds.FORWARD_ERROR

    def fault(self, layers):
        """Returns what makes the outputs wrong; see `Run`."""
        if math.isfinite(self.error):
            return Fault("precision_loss", "forward")
        cause = self._cause(layers) or Cause("forward_overflow", None)
        return Fault(cause.kind, "forward", cause.evidence)

    def fault_behind(self, call):
        """Returns what is wrong behind a layer; see `Run`."""
        if math.isfinite(self.error):
            return Fault("precision_loss", "forward")
        known = self.exact_calls.get(call.name)
        replay = LayerReplay(call, self._compiled)
        cause = self._cause([call.layer])
        if cause is None:
            return Fault(range_kind(replay, known), "forward")
        return Fault(cause.kind, "forward", cause.evidence)

    def _cause(self, layers):
        """What the first operation that is not finite comes from."""
        with computing_in("float32", layers):
            harmless = nonfinite_places(self._prediction.tensors, [])
        return cause_of_nonfinite(self._prediction.tensors, [], harmless)

    def numbers(self):
        """Returns how far the outputs are off."""
        return {"output_error": self.error}


class LoopRun(CallRun):
    """The same of a function that calls a model, such as a loop.

    Args:
        prediction: `RecordedCalls`.
        exact: As for `CallRun`.
        compiled: As for `CallRun`.
    """

    def located(self, culprit, call):
        """Adds which call of the layer it is."""
        numbers = {"call": call.index + 1} | culprit.numbers
        return culprit._replace(numbers=numbers)

    def _right_in_xla(self):
        # It may be; a loop is not compiled for that.
        return self._compiled and math.isfinite(self.error)

    def _cause(self, layers):
        return None  # Python that reads numbers cannot be traced on JAX.
