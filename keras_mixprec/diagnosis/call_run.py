"""Calls of a model without a loss in 16 bits, compared with float32."""

import math

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import pass_error
from keras_mixprec.diagnosis.criterion import Criterion
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
    """Runs `predict` on one batch, again and again.

    Args:
        prediction: `Prediction`.
        exact: `ForwardPass` of it in float32.
        compiled: Boolean, whether XLA compiles the call.
    """

    def __init__(self, prediction, exact, compiled: bool):
        model, self._prediction = prediction.model, prediction

        def rounded(seed):
            with jittered(model, seed):
                return prediction.exact(records=False)

        def distances(low, exact):
            return {"outputs": pass_error(low, exact)}

        criterion = Criterion(
            exact, rounded, distances, {}, thresholds.LOSS_ERROR
        )
        super().__init__(model, exact, compiled, criterion)

    def culprits(self, known: list[Culprit]) -> list[Culprit]:
        """Returns what is to blame if the outputs are wrong.

        Args:
            known: List of `Culprit`s that are known already. The list begins
                with these.
        """
        self.demoted = layers_of(known)
        low = self.record([])
        if not self.wrong(low):
            return known
        return [*known, *culprits_of(self, self.low(low.calls))]

    def _note_errors(self, low):
        self.error = pass_error(low, self._exact)

    def _recorded(self):
        return self._prediction.run()

    def _is_right(self):
        return self._criterion.fits(self._prediction.run(records=False))

    def wrong_in_xla(self) -> bool:
        """Returns whether it is wrong as XLA computes it."""
        with computing_in("float32", self.demoted):
            low = self._prediction.compiled()
        exact = self._prediction.compiled_exact()
        return pass_error(low, exact) > thresholds.LOSS_ERROR

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
        """Returns the cause of the first operation that is not finite."""
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

    def wrong_in_xla(self) -> bool:
        """Returns whether it surely is: a loop is not compiled for that."""
        return not math.isfinite(self.error)

    def _cause(self, layers):
        # JAX cannot trace Python code that reads numbers of tensors.
        return None
