"""Which demotions the result of a whole run is wrong without."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import Culprit, layers_of
from keras_mixprec.diagnosis.end_to_end import loss_error
from keras_mixprec.keras_internals import own_non_trainable
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.rounding import jittered, rounded_otherwise

# Culprits of which each is left out by itself, to see if it is needed.
_FEW = 4


class Needed:
    """Asks the whole run whether a demotion makes a difference.

    What a run is, subclasses say: `_run` runs it, `_off` is how far each part
    of its result is off.
    """

    def __init__(self):
        self._noise: dict = {}
        self._ignored: set = set()

    def _run(self, records: bool) -> Any:
        """Returns the run as the layers compute now, with its `calls`.

        Without them if not `records` and it is cheaper so.
        """
        raise NotImplementedError

    def _off(self, run) -> dict:
        """Returns the share by which each part of the result is off."""
        raise NotImplementedError

    def _limit(self, part) -> float:
        """Returns the share by which a part may be off."""
        raise NotImplementedError

    def _rounded(self) -> Iterator:
        """Yields runs in float32 with weights off by half an ulp."""
        raise NotImplementedError

    def among(self, culprits: list[Culprit]) -> list[Culprit]:
        """Returns the culprits that the result is wrong without.

        Each with those of its layers that it takes. An output that is not
        finite stays one: a result that ignores it in this batch may meet it in
        the next.

        Args:
            culprits: List of `Culprit`.
        """
        self._ignored = {
            c.path
            for c in culprits
            if c.numbers.get("nonfinite_gradients")
            and self._meets_nonfinite(c, culprits)
        }
        if not any(self._may_go(c) or len(c.layers) > 1 for c in culprits):
            return culprits
        repaired = self._errors(layers_of(culprits))
        if repaired is None or not all(map(math.isfinite, repaired.values())):
            return culprits
        self._find_unresolved()
        kept = self._without_many(culprits, repaired)
        for culprit in reversed(kept):
            position = kept.index(culprit)
            others = kept[:position] + kept[position + 1 :]
            rest = layers_of(others)
            if self._may_go(culprit) and self._as_right(rest, repaired):
                kept = others
                continue
            layers = self._without_needless(culprit, rest, repaired)
            kept[position] = culprit._replace(layers=layers)
        return kept

    def _without_many(self, culprits, repaired):
        """The culprits less those that all may go at once, by halves.

        Of a chain of 77 as few are needed as one by one, with a run in place
        of 50. Up to `_FEW` cost less one by one.
        """

        def without(spared, kept):
            if len(spared) <= _FEW:
                return kept
            gone = set(map(id, spared))
            rest = [c for c in kept if id(c) not in gone]
            if self._as_right(layers_of(rest), repaired):
                return rest
            middle = len(spared) // 2
            return without(spared[:middle], without(spared[middle:], kept))

        return without([*filter(self._may_go, culprits)], list(culprits))

    def _may_go(self, culprit):
        """Whether the result would be wrong for it, as far as it matters.

        Not what is not finite with the cotangents of float32: with those of
        this batch that arrive in 16 bits it may just fit, unless they were seen
        to do the same. Nor what is lost on the way to a loss that is still
        large.
        """
        numbers = culprit.numbers
        if culprit.path in self._ignored:
            return True
        if "lost_share" in numbers:
            return False
        bad = numbers.get("nonfinite_outputs")
        bad = bad or numbers.get("nonfinite_gradients")
        state = any(own_non_trainable(layer) for layer in culprit.layers)
        kinds = "precision_loss", "underflow", "weight_underflow"
        imprecise = culprit.kind in kinds
        return imprecise and not bad and not state

    def _meets_nonfinite(self, culprit, culprits):
        """Whether its gradients in the run itself are not finite either.

        A result that is right all the same ignores them, as a ReLU does on
        torch and JAX, which takes no gradient where it is 0.
        """
        return False

    def _without_needless(self, culprit, rest, repaired):
        layers = culprit.layers
        # As right without any of them, for the noise of rounded weights, the
        # result does not tell one from another.
        if len(layers) > 1 and self._as_right(rest, repaired, culprit.path):
            return layers
        for sublayer in layers[1:]:
            inside = {id(layer) for layer in with_sublayers(sublayer)}
            fewer = [layer for layer in layers if id(layer) not in inside]
            if len(fewer) < len(layers) and self._as_right(
                [*rest, *fewer], repaired, culprit.path
            ):
                layers = fewer
        return layers

    def _find_unresolved(self):
        """Notes what is another in float32 if the weights are rounded."""
        for other in self._rounded():
            for part, error in self._off(other).items():
                if error > max(self._limit(part), self._noise.get(part, 0.0)):
                    self._noise[part] = error

    def _resolved(self, part, error):
        """An error, 0 where rounded weights alone do not do much less."""
        noise = self._noise.get(part, 0.0)
        counts = (
            noise < thresholds.ALL_NOISE
            and error > thresholds.BEYOND_NOISE * noise
        )
        return error if counts or not math.isfinite(error) else 0.0

    def _as_right(self, demoted, repaired, path=None):
        """Whether nothing is off by more than it may be, or was anyhow."""
        errors = self._errors(demoted, path)
        return errors is not None and all(
            error
            <= max(self._limit(part), thresholds.AS_RIGHT * repaired[part])
            for part, error in errors.items()
        )

    def _errors(self, demoted, path=None):
        """How far each part of the result is off, `None` if it does not run.

        `None` as well if the layer of the path returns non-finite numbers.
        """
        try:
            with computing_in("float32", demoted):
                run = self._run(path is not None)
        # TensorFlow and torch refuse to mix some dtypes within a layer.
        except active.replay().REFUSALS:
            return None
        own = [c for c in run.calls if c.path == path]
        if any(nonfinite(map(to_array, c.float_outputs)) for c in own):
            return None
        return {
            part: self._resolved(part, error)
            for part, error in self._off(run).items()
        }


class NeededInStep(Needed):
    """In a train step, its loss and the gradients of its variables.

    In it every layer is given the cotangents that really arrive in 16 bits.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the model in float32, at loss scale 1.
        scale: Float. The loss scale.
        effective: Function from a variable and its gradient to whether the
            optimizer would move the variable by it.
    """

    def __init__(
        self,
        model: keras.Model,
        data,
        exact: DryStep,
        scale: float,
        effective: Callable,
    ):
        super().__init__()
        self._model = model
        self._data = data
        self._scale = scale
        self._loss = exact.loss
        # A gradient that moves nothing is no reason.
        self._gradients = {
            id(v): to_array(exact.gradients[id(v)])
            for v in model.trainable_variables
            if id(v) in exact.gradients
            and effective(v, to_array(exact.gradients[id(v)]))
        }

    def _run(self, records):
        return dry_step(self._model, self._data, self._scale)

    def _meets_nonfinite(self, culprit, culprits):
        others = [c for c in culprits if c is not culprit]
        try:
            with computing_in("float32", layers_of(others)):
                run = self._run(records=True)
        except active.replay().REFUSALS:
            return False
        cotangents = [
            to_array(x)
            for call in run.calls
            if call.path == culprit.path
            for x in call.input_cotangents
            if x is not None
        ]
        return bool(nonfinite(cotangents))

    def _limit(self, part):
        own = part == "loss"
        return thresholds.LOSS_ERROR if own else thresholds.RESOLVED_GRADIENT

    def _off(self, run):
        gradients = {
            key: _gradient_error(run, key, exact)
            for key, exact in self._gradients.items()
        }
        return {"loss": loss_error(run.loss, self._loss)} | gradients

    def _rounded(self):
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                data = rounded_otherwise(self._data, seed)
                yield exact_step(self._model, data, records=False)


def _gradient_error(step, key, exact):
    if key not in step.gradients:
        return math.inf
    low = to_array(step.gradients[key]) / np.float32(step.scale)
    return math.inf if nonfinite([low]) else relative_error([low], [exact])
