"""Finding the layers whose precision is at fault in calls without a loss."""

import math

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import pass_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.forward import check_forward, range_kind
from keras_mixprec.diagnosis.needed import Needed
from keras_mixprec.diagnosis.run_search import RunSearch
from keras_mixprec.diagnosis.smallest_set import smallest_set
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.layer_replay import (
    LayerReplay,
    cause_of_nonfinite,
    nonfinite_places,
)
from keras_mixprec.numerics.rounding import jittered
from keras_mixprec.policies.layers import MODEL_PATH


class CallSearch(RunSearch):
    """The search in what `predict` does with one batch.

    Args:
        prediction: `Prediction`.
        exact: `ForwardPass` of it in float32.
        compiled: Boolean. Whether XLA compiles the call.
    """

    def __init__(self, prediction, exact, compiled: bool):
        super().__init__(prediction.model, None, exact, compiled)
        self._prediction = prediction

    def run(self, known: list[Culprit], most: float = math.inf):
        """Finds the culprits.

        Args:
            known: List of `Culprit`, those that are known before.
            most: Number. Of more culprits it is not asked which of them the
                outputs are right without, in a run or two for each. Defaults to
                infinity.
        """
        for culprit in known:
            self._demote_what_runs(culprit, self._exact)
        step = self._end_to_end(self._forward())
        if not math.isfinite(self._error(step)):
            self._jointly(step)
        if len(self.culprits) > most:
            return
        needed = _NeededInCall(self._prediction, self._exact, self._infinite)
        self.culprits = needed.among(self.culprits)

    def _dry_step(self, demoted, known=()):
        with computing_in("float32", demoted):
            return self._prediction.run()

    def _error(self, step):
        return pass_error(step, self._exact)

    def _wrong(self, demoted):
        return all(
            error > thresholds.LOSS_ERROR and (resolved or error == math.inf)
            for error, resolved in self._however_rounded(demoted)
        )

    def _right(self, demoted):
        return all(
            error <= thresholds.LOSS_ERROR
            for error, _ in self._however_rounded(demoted)
        )

    def _however_rounded(self, demoted):
        """Errors with weights off by half an ulp; if float32 resolves them."""
        for exact in _jittered(self._prediction):
            with computing_in("float32", demoted):
                low = self._prediction.run(records=False)
            resolved = self._error(exact) <= thresholds.LOSS_ERROR
            yield pass_error(low, exact), resolved

    def _is_finite(self, step):
        return math.isfinite(self._error(step))

    def _right_in_xla(self):
        if not self._compiled:
            return False
        with self._as_demoted():
            low = self._prediction.compiled()
        exact = self._prediction.compiled_exact()
        return pass_error(low, exact) <= thresholds.LOSS_ERROR

    def _masks_may_matter(self, step):
        return self._error(step) > thresholds.LOSS_ERROR

    def _is_cause(self, step, repaired):
        # Demoting any one of many layers that round alike leaves more.
        least = thresholds.ONE_CAUSE * self._error(step)
        return not self._is_finite(step) or self._error(repaired) <= least

    def _fault_behind(self, call, layers):
        return self._fault(layers) or (self._range_kind(call), "forward")

    def _fault(self, layers):
        """Kind and direction of the first operation that is not finite."""
        with computing_in("float32", layers):
            harmless = nonfinite_places(self._prediction.tensors, [])
        kind = cause_of_nonfinite(self._prediction.tensors, [], harmless)
        return (kind, "forward") if kind else None

    def _range_kind(self, call):
        known = self._exact_calls.get(call.name)
        return range_kind(LayerReplay(call, self._compiled), known)

    def _numbers_of(self, step):
        return {"output_error": self._error(step)}

    # Where no layer alone repairs it.

    def _jointly(self, step):
        """Demotes the smallest set of layers that outputs are finite with."""
        low = [call for call in self._low(step) if call.path != MODEL_PATH]
        layers = {call.path: call.layer for call in low}
        # The last ones first, whose results the code behind them takes.
        ranked = [*reversed(layers)]

        def fits(paths):
            wide = [layers[path] for path in paths]
            return self._runs_finite([*self._demoted, *wide])

        found = smallest_set(ranked, fits)
        if found is None:
            fault = self._fault([]) or ("forward_overflow", "forward")
            numbers = self._numbers_of(step)
            self.culprits.append(Culprit(MODEL_PATH, [], *fault, numbers))
            return
        calls = {call.path: call for call in low}
        for path in [path for path in layers if path in found]:
            self._demote(self._one_of(calls[path], step))

    def _one_of(self, call, step):
        with self._as_demoted():
            _, culprit = check_forward(call, None, self._compiled, True)
            if culprit is None:
                fault = self._fault_behind(call, [call.layer])
                numbers = self._numbers_of(step)
                culprit = Culprit(call.path, [], *fault, numbers)
        return self._located(culprit._replace(layers=[call.layer]), call)

    def _runs_finite(self, demoted):
        return self._runs(demoted) and self._is_finite(self._dry_step(demoted))


class LoopSearch(CallSearch):
    """The search in a function that calls a model, such as a loop.

    Args:
        prediction: `RecordedCalls`.
        exact: As for `CallSearch`.
        compiled: As for `CallSearch`.
    """

    def _located(self, culprit, call):
        numbers = {"call": call.index + 1} | culprit.numbers
        return culprit._replace(numbers=numbers)

    def _demote_what_runs(self, culprit, step):
        try:
            return super()._demote_what_runs(culprit, step)
        # Caches of another dtype, say: the search ends with this one.
        except active.replay().REFUSALS:
            self._demoted = with_sublayers(self._model)
            return self._dry_step(self._demoted)

    def _right_in_xla(self):
        # It may be; a loop is not compiled for that.
        step = self._dry_step(self._demoted)
        return self._compiled and self._is_finite(step)

    def _fault(self, layers):
        return None  # Python that reads numbers cannot be traced on JAX.


class _NeededInCall(Needed):
    """In a call, all that it returns."""

    def __init__(self, prediction, exact, infinite):
        super().__init__()
        self._prediction = prediction
        self._exact = exact
        self._infinite = infinite

    def _run(self, records):
        return self._prediction.run(records=records)

    def _off(self, run):
        return {"outputs": pass_error(run, self._exact)}

    def _limit(self, part):
        return thresholds.LOSS_ERROR

    def _rounded(self):
        return _jittered(self._prediction)

    def _may_go(self, culprit):
        if culprit.path in self._infinite:  # By masks, if outputs are right.
            return True
        imprecise = ("precision_loss", "underflow", "weight_underflow")
        bad = culprit.numbers.get("nonfinite_outputs")
        return culprit.kind in imprecise and not bad


def _jittered(prediction):
    """Yields what float32 gives with weights off by half an ulp, meanwhile."""
    for seed in range(thresholds.LOSS_JITTERS):
        with jittered(prediction.model, seed):
            yield prediction.exact(records=False)
