"""The smallest set of layers that inference in 16 bits keeps in float32."""

import logging
import math
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice_in_call
from keras_mixprec.diagnosis.batch import build_for_predict, to_tensors
from keras_mixprec.diagnosis.call_run import CallRun
from keras_mixprec.diagnosis.compare import output_error, relative_error
from keras_mixprec.diagnosis.culprit import Culprit, low_layers
from keras_mixprec.diagnosis.forward import range_kind
from keras_mixprec.diagnosis.search import causes
from keras_mixprec.diagnosis.smallest_set import rank, smallest_set
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.diagnosis.weights import weight_overflows
from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.numerics.forward_pass import Prediction
from keras_mixprec.numerics.layer_hooks import (
    computing_in,
    temporary_policies,
)
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.policies.names import is_fixed

_log = logging.getLogger("keras_mixprec.inference")

# Sets of layers that are tried: each is a run of the model, of which about two
# are needed for each layer that has to stay. With new weights the activations
# of EfficientNetB7 vanish in hundreds of its 813 layers.
_MOST_TRIED = 400

# Stored in 16 bits, a weight is computed with as if it were cast to them.
_COMPUTES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


class WideSet(NamedTuple):
    """The layers that are to stay in float32, and why.

    Attributes:
        verdicts: Dict from the path of each to the `Verdict`, in the order of
            the model; empty if none is needed. `output_error_without` among
            its numbers is how far the outputs are off with it in 16 bits, and
            the others in float32; it is left out where that was not tried.
        layers: List of the layers themselves.
        drift: Float. How far the outputs are off, as a share of float32's, of
            the batch and the output that are off the farthest.
        drift_without: Float. The same with none of them in float32; infinite
            if something is not finite then.
        is_smallest: Boolean. Whether it is known that no layer can be spared,
            which is not tried for any number of them.
    """

    verdicts: dict[str, Verdict]
    layers: list
    drift: float
    drift_without: float
    is_smallest: bool


def smallest_wide_set(
    model: keras.Model,
    batches: list,
    policy: str | None = None,
    tolerance: float = 0.01,
) -> WideSet:
    """Returns the smallest set of layers that `predict` needs in float32.

    So that its outputs agree with float32's on all batches. No layer of the set
    can be spared, as far as that was tried. Nothing is changed in the model.

    Args:
        model: A `keras.Model`, compiled or not.
        batches: List of batches of inputs, as `model.predict` takes them.
        policy: String. What all other layers follow: `"mixed_float16"`,
            `"mixed_bfloat16"`, or `"float16"` and `"bfloat16"` for weights that
            are stored in 16 bits. Defaults to `None`, what they follow now.
        tolerance: Float, above 0. The share by which an output may be off.
            Defaults to `0.01`.

    Raises:
        ValueError: If float32 has no finite output, or not even all layers in
            float32 that may be are enough.
    """
    inputs = [to_tensors((x, None, None))[0] for x in batches]
    # Constants that overflow float16 are what is looked for.
    with np.errstate(all="ignore"):
        build_for_predict(model, inputs[0])
        all_layers = [x for x in flat_layers(model) if not is_fixed(x)]
        low = {_COMPUTES.get(policy, policy): all_layers} if policy else {}
        with (
            active.processes().single_process(model),
            same_draws(),
            temporary_policies(low),
        ):
            predictions = [Prediction(model, x) for x in inputs]
            return _WideSearch(model, predictions, tolerance).find()


class _WideSearch:
    def __init__(self, model, predictions, tolerance):
        self._model = model
        self._predictions = predictions
        self._exact = [p.exact(records=False).outputs for p in predictions]
        self._tolerance = tolerance
        self._entries = low_layers(model)
        self._layers = {e.path: e.layer for e in self._entries}
        self._known = {}
        self._all_tried = True

    def find(self):
        if not any(np.isfinite(a).any() for x in self._exact for a in x):
            raise ValueError(
                "In float32 no output is finite on these data, so precision "
                "is not what is wrong; `keras_mixprec.diagnose(model, x)` says "
                "more."
            )
        must = weight_overflows(self._model)
        paths = {culprit.path for culprit in must}
        needed = frozenset(paths) & frozenset(self._layers)
        if not self._fits(needed):
            errors = self._instabilities()
            ranked = [e.path for e in rank(self._entries, errors)]
            ranked = [path for path in ranked if path not in needed]
            more = smallest_set(
                ranked, lambda paths: self._is_enough(needed | paths)
            )
            if more is None:
                raise self._unreachable()
            needed |= more
        in_order = [path for path in self._layers if path in needed]
        culprits = self._causes(needed, must) if needed else {}
        return WideSet(
            {path: self._verdict(path, needed, culprits) for path in in_order},
            [self._layers[path] for path in in_order],
            self._drift(needed),
            self._drift(frozenset()),
            self._all_tried,
        )

    def _drift(self, paths):
        """How far the outputs are off with the layers in float32."""
        if paths not in self._known:
            wide = [self._layers[path] for path in paths]
            error = self._known[paths] = max(self._errors(wide))
            _log.info(
                "With %d of %d layers in float32 outputs are off by %.2g",
                len(wide),
                len(self._layers),
                error,
            )
        return self._known[paths]

    def _fits(self, paths):
        return self._drift(frozenset(paths)) <= self._tolerance

    def _is_enough(self, paths):
        """Whether they fit; not, once as many have been tried as may be."""
        if paths not in self._known and len(self._known) >= _MOST_TRIED:
            self._all_tried = False
            return False
        return self._fits(paths)

    def _errors(self, wide):
        """How far the outputs of each batch are off; infinite if it raises."""
        with computing_in("float32", wide):
            for prediction, exact in zip(
                self._predictions, self._exact, strict=True
            ):
                try:
                    low = prediction.run(records=False).outputs
                except active.replay().REFUSALS:
                    yield math.inf
                else:
                    yield output_error(low, exact)

    # Which layers, and why.

    def _instabilities(self):
        """How far each layer is off by itself, as a multiple of what may be."""
        errors = {}
        for prediction in self._predictions:
            for call in prediction.exact().calls:
                if call.path in self._layers:
                    own = self._own_error(call) / self._tolerance
                    errors[call.path] = max(own, errors.get(call.path, 0.0))
        return errors

    def _causes(self, needed, must):
        """What is wrong with each layer, by path."""
        parts = {p: [self._layers[p]] for p in self._layers if p in needed}
        found = {culprit.path: culprit for culprit in must}
        for prediction in self._predictions:
            run = CallRun(prediction, prediction.exact(), False)
            run.error = self._drift(frozenset())
            for culprit in causes(run, parts):
                found.setdefault(culprit.path, culprit)
        return found

    def _own_error(self, call):
        replay = LayerReplay(call)
        try:
            return relative_error(replay.forward(), replay.forward("float32"))
        except active.replay().REFUSALS:
            return math.inf

    def _verdict(self, path, found, culprits):
        numbers, without = {}, found - {path}
        if self._all_tried or without in self._known:
            numbers["output_error_without"] = self._drift(without)
        culprit = culprits.get(path) or self._imprecise(path, numbers)
        numbers = culprit.numbers | numbers
        return Verdict(
            culprit.kind,
            path,
            culprit.direction,
            numbers=numbers,
            advice=advice_in_call(culprit),
        )

    def _imprecise(self, path, numbers):
        """A layer that only the outputs as a whole need."""
        kind = "precision_loss"
        if not math.isfinite(numbers.get("output_error_without", 0.0)):
            calls = self._predictions[0].exact().calls
            own = [LayerReplay(call) for call in calls if call.path == path]
            kind = range_kind(own[0]) if own else "forward_overflow"
        return Culprit(path, [self._layers[path]], kind, "forward", {})

    def _unreachable(self):
        paths = frozenset(self._layers)
        return ValueError(
            "Even with all layers in float32 that may be, the outputs are off "
            f"by {self._drift(paths):.2%}. Allow more with `tolerance`. "
            f"Received: tolerance={self._tolerance}"
        )
