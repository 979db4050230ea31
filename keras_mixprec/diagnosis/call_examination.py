"""Examines `predict`, and other calls without a loss."""

import math

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import (
    FLOAT32_FAILS_TOO,
    advice,
    advice_for,
)
from keras_mixprec.diagnosis.batch import build_for_predict, nonfinite_rows
from keras_mixprec.diagnosis.cause import lost_weights, weight_overflows
from keras_mixprec.diagnosis.criterion import RESULT, Criterion, pass_error
from keras_mixprec.diagnosis.culprit import Culprit, layers_of, low_layers
from keras_mixprec.diagnosis.search import Run, culprits_of
from keras_mixprec.diagnosis.step_errors import without_what_raises
from keras_mixprec.diagnosis.verdict import Finding, Verdict
from keras_mixprec.numerics.calls import interruption
from keras_mixprec.numerics.forward_pass import Prediction, RecordedCalls
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import (
    cause_of_nonfinite,
    nonfinite_places,
)
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.numerics.rounding import jittered


class CallRun(Run):
    """Runs `predict` repeatedly on one batch, with layers in various dtypes.

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
            return {RESULT: pass_error(low, exact)}

        criterion = Criterion(exact, rounded, distances)
        super().__init__(model, exact, compiled, criterion)

    def culprits(self, known: list[Culprit]) -> list[Culprit]:
        """Returns the culprits: the known ones and those that the search finds.

        Args:
            known: List of `Culprit`s that are known already.
        """
        self.demoted = layers_of(known)
        low = self.record([])
        if not self.wrong(low):
            return known
        return [*known, *culprits_of(self, self.low(low.calls))]

    def take(self, *, records=False):
        """Runs `predict`; see `Run`."""
        return self._prediction.run(records=records)

    def compiled(self):
        """Runs `predict` as XLA computes it; see `Run`."""
        return self._prediction.compiled()

    def cause(self, layers):
        """Returns why an output is not finite; see `Run`."""
        if math.isfinite(self.errors[RESULT]):
            return None
        with computing_in("float32", layers):
            harmless = nonfinite_places(self._prediction.tensors, [])
        return cause_of_nonfinite(self._prediction.tensors, [], harmless)

    def numbers(self):
        """Returns the error of the outputs."""
        return {"output_error": self.errors[RESULT]}


class LoopRun(CallRun):
    """Runs a function that calls a model, such as a loop.

    Args:
        prediction: `RecordedCalls`.
        exact: As for `CallRun`.
        compiled: As for `CallRun`.
    """

    def located(self, culprit, call):
        """Adds the number of the layer's call to the culprit."""
        numbers = {"call": call.index + 1} | culprit.numbers
        return culprit._replace(numbers=numbers)

    def wrong_in_xla(self) -> bool:
        """Returns whether an output is non-finite; a loop is not compiled."""
        return not math.isfinite(self.errors[RESULT])

    def cause(self, layers):
        """Returns `None`, because JAX cannot trace code that reads numbers."""
        return


def examine_prediction(
    model: keras.Model, x, step: int | None = None
) -> list[Finding]:
    """Diagnoses `predict` on one batch.

    Args:
        model: A `keras.Model`, compiled or not.
        x: One batch of inputs, as tensors.
        step: As for `diagnose`.
    """
    compiled = is_compiled(model)
    # Ignore NumPy's warnings about constants that overflow float16.
    with np.errstate(all="ignore"):
        build_for_predict(model, x)
        prediction = Prediction(model, x)
        return examine_calls(prediction, CallRun, {"x": x}, compiled, step)


def is_compiled(model: keras.Model) -> bool:
    """Returns whether XLA compiles the steps of a model.

    Args:
        model: A `keras.Model`, compiled or not.
    """
    return bool(model.jit_compile) and not model.run_eagerly


def examine_calls(
    prediction: Prediction | RecordedCalls,
    run_class: type[CallRun],
    given: dict,
    compiled: bool,
    step: int | None = None,
) -> list[Finding]:
    """Diagnoses calls to a built model.

    Args:
        prediction: `Prediction` or `RecordedCalls`.
        run_class: The class that runs the prediction.
        given: Dict from names to inputs, as structures of tensors.
        compiled: Boolean, whether XLA compiles the calls.
        step: As for `diagnose`.
    """
    model = prediction.model
    with active.processes().single_process(model), same_draws():
        return _find(prediction, run_class, given, compiled, step)


def _find(prediction, run_class, given, compiled, step):
    model = prediction.model

    def verdict(kind, numbers, sentence=None, culprit=None):
        place = (culprit.path, culprit.direction) if culprit else (None, None)
        sentence = sentence or advice(kind, **numbers)
        found = Verdict(kind, *place, step, compiled, numbers, sentence)
        return Finding(found, culprit.layers if culprit else [])

    if lost := lost_weights(model):
        return [verdict("weights_lost", lost)]
    weights = weight_overflows(model)
    exact = prediction.exact()
    # Infinite outputs may be masked scores, so only NaN counts as a fault.
    nan = sum(int(np.isnan(output).sum()) for output in exact.outputs)
    rows = nonfinite_rows(**given) if nan else {}
    culprits = weights
    if not rows and low_layers(model):
        culprits = _culprits(prediction, run_class, exact, compiled, weights)
    found = [verdict("bad_data", rows)] if rows else []
    found += [
        verdict(c.kind, c.numbers, advice_for(c), c)
        for culprit in culprits
        for c in culprit.by_layer(model)
    ]
    if nan and not rows:
        numbers = {"nan_in_float32": nan}
        found.append(verdict("divergence", numbers, FLOAT32_FAILS_TOO))
    return found


def _culprits(prediction, run_class, exact, compiled, known):
    model = prediction.model
    found, raising = without_what_raises(
        lambda: run_class(prediction, exact, compiled).culprits(known),
        model,
        lambda: interruption(model, prediction.tensors),
        prediction.compiled if compiled else None,
    )
    return [*raising, *found]
