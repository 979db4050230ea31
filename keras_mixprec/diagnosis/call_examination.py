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
    common = {"compiled": compiled, "step": step}
    with active.processes().single_process(prediction.model), same_draws():
        return _Verdicts(prediction, run_class, given, common).find()


class _Verdicts:
    def __init__(self, prediction, run_class, given, common):
        self._prediction = prediction
        self._model = prediction.model
        self._run_class = run_class
        self._given = given
        self._common = common

    def find(self):
        lost = lost_weights(self._model)
        if lost:
            return [self._verdict("weights_lost", lost)]
        weights = weight_overflows(self._model)
        exact = self._prediction.exact()
        # Infinities may stand for what is masked.
        if any(np.isnan(output).any() for output in exact.outputs):
            rows = nonfinite_rows(**self._given)
            if rows:
                bad = self._verdict("bad_data", rows)
                return [bad, *self._blamed(weights)]
        found = self._blamed(self._search(exact, weights))
        return found + self._fails_in_float32(exact)

    def _search(self, exact, known):
        if not low_layers(self._model):
            return []
        compiled = self._common["compiled"]

        def run():
            own = self._run_class(self._prediction, exact, compiled)
            return own.culprits(known)

        def stop():
            return interruption(self._model, self._prediction.tensors)

        culprits, raising = without_what_raises(
            run,
            self._model,
            stop,
            self._prediction.compiled if compiled else None,
        )
        return [*raising, *culprits]

    def _blamed(self, culprits):
        return [
            Finding(
                Verdict(
                    c.kind,
                    c.path,
                    c.direction,
                    numbers=c.numbers,
                    advice=advice_in_call(c),
                    **self._common,
                ),
                c.layers,
            )
            for found in culprits
            for c in found.by_layer(self._model)
        ]

    def _fails_in_float32(self, exact):
        count = sum(int(np.isnan(output).sum()) for output in exact.outputs)
        if not count:
            return []
        numbers = {"nan_in_float32": count}
        return [self._verdict("divergence", numbers, FLOAT32_FAILS_TOO)]

    def _verdict(self, kind, numbers, sentence=None):
        sentence = sentence or advice(kind, **numbers)
        verdict = Verdict(
            kind, numbers=numbers, advice=sentence, **self._common
        )
        return Finding(verdict, [])
