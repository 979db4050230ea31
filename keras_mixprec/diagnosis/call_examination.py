"""The examination of what `predict` does: no loss, no gradients."""

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import (
    FLOAT32_FAILS_TOO,
    advice,
    advice_in_call,
)
from keras_mixprec.diagnosis.batch import build_for_predict, nonfinite_rows
from keras_mixprec.diagnosis.call_run import CallRun
from keras_mixprec.diagnosis.culprit import low_layers
from keras_mixprec.diagnosis.step_errors import without_what_raises
from keras_mixprec.diagnosis.verdict import Finding, Verdict
from keras_mixprec.diagnosis.weights import lost_weights, weight_overflows
from keras_mixprec.numerics.forward_pass import Prediction
from keras_mixprec.numerics.interruption import interruption
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.numerics.recorded_calls import RecordedCalls


def examine_prediction(
    model: keras.Model, x, step: int | None = None
) -> list[Finding]:
    """Diagnoses what `predict` does with one batch.

    Args:
        model: A `keras.Model`, compiled or not.
        x: One batch of inputs, as tensors.
        step: As for `diagnose`.
    """
    compiled = is_compiled(model)
    # Constants that overflow float16 are expected here.
    with np.errstate(all="ignore"):
        build_for_predict(model, x)
        prediction = Prediction(model, x)
        return examine_calls(prediction, CallRun, {"x": x}, compiled, step)


def is_compiled(model: keras.Model) -> bool:
    """Returns whether XLA compiles what a model's own methods run.

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
    """Diagnoses calls of a built model.

    Args:
        prediction: `Prediction` or `RecordedCalls`.
        run_class: The class of the run of it.
        given: Dict from names to the structures that it was given.
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
    # Infinities may stand for what is masked.
    nan = sum(int(np.isnan(output).sum()) for output in exact.outputs)
    rows = nonfinite_rows(**given) if nan else {}
    culprits = weights
    if not rows and low_layers(model):
        culprits = _culprits(prediction, run_class, exact, compiled, weights)
    found = [verdict("bad_data", rows)] if rows else []
    found += [
        verdict(c.kind, c.numbers, advice_in_call(c), c)
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
