"""Finds the layers that inference in 16 bits keeps in float32.

The search of the diagnosis finds the smallest set of layers that brings the
outputs of all batches within the tolerance if the layers compute in float32.
"""

import logging

import keras

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice_for
from keras_mixprec.diagnosis.call_examination import CallRun, is_compiled
from keras_mixprec.diagnosis.criterion import RESULT, output_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.search import culprits_of
from keras_mixprec.diagnosis.step_errors import without_what_raises
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.inference.comparison import to_tensors
from keras_mixprec.numerics.calls import interruption
from keras_mixprec.numerics.forward_pass import Prediction
from keras_mixprec.numerics.random_numbers import same_draws

_log = logging.getLogger("keras_mixprec.inference")

# The maximum number of sets of layers that the search tries. Each set costs a
# run of the model, and each layer that stays in float32 takes about two sets.
# With untrained weights, hundreds of EfficientNetB7's 813 layers underflow, and
# an unlimited search would take too long.
_MOST_TRIED = 400


def wide_layers(
    model: keras.Model, batches: list, tolerance: float
) -> tuple[list[Culprit], bool]:
    """Returns the smallest set of layers that `predict` needs in float32.

    With these layers, its outputs are within the tolerance on all batches. The
    model does not change.

    Args:
        model: A built `keras.Model` that follows the policies to start from.
        batches: List of batches of inputs, the one with the largest error
            first.
        tolerance: Float, above 0. The largest relative error of an output.

    Returns:
        Pair of the `Culprit`s and a boolean. The boolean is `False` if the
        search ended early, so fewer layers may be enough.
    """
    with active.processes().single_process(model), same_draws():
        run = _Batches([Prediction(model, to_tensors(x)) for x in batches])
        run.tolerance = tolerance
        culprits = run.found()
        return culprits, run.tried < _MOST_TRIED


class _Batches(CallRun):
    """Runs `predict` on some batches, and looks for causes in the first one."""

    tolerance = 0.0
    tried = 0

    def __init__(self, predictions):
        super().__init__(predictions[0], predictions[0].exact(), False)
        self._pairs = [(p, p.exact(records=False)) for p in predictions]

    def found(self):
        """Returns the `Culprit`s."""
        low = self.record([])
        self.compare(low)
        return culprits_of(self, self.low(low.calls))

    def compare(self, run):
        """Compares the outputs on the first batch with float32's."""
        error = output_error(run.outputs, self._exact.outputs)
        self.errors = {RESULT: error}

    def right(self, layers):
        """Returns `CallRun`'s answer, or `False` once the tries are used up."""
        if self.tried >= _MOST_TRIED:
            return False
        self.tried += 1
        return super().right(layers)

    def _is_right(self, run):
        runs = [run, *(p.run(records=False) for p, _ in self._pairs[1:])]
        errors = [
            output_error(own.outputs, exact.outputs)
            for own, (_, exact) in zip(runs, self._pairs, strict=True)
        ]
        _log.info("The drift in trial %d is %.2g", self.tried, max(errors))
        return max(errors) <= self.tolerance


def layers_that_raise(model: keras.Model, batch) -> list[Culprit]:
    """Returns the layers that raise in 16 bits, or that XLA cannot compile.

    TensorFlow and torch refuse to add float16 to float32. Some backends lack
    operations in 16 bits, such as JAX float16 attention on CPUs.

    Args:
        model: As for `wide_layers`.
        batch: A batch of inputs.
    """
    prediction = Prediction(model, to_tensors(batch))
    compiled = prediction.compiled if is_compiled(model) else None
    try:
        return without_what_raises(
            compiled or prediction.tensors,
            model,
            lambda: interruption(model, prediction.tensors),
            compiled,
        )[1]
    except active.replay().REFUSALS:
        return []


def reason(culprit: Culprit) -> str:
    """Returns why a layer stays in float32."""
    return Verdict(
        culprit.kind,
        culprit.path,
        culprit.direction,
        numbers=culprit.numbers,
        advice=advice_for(culprit),
    ).finding
