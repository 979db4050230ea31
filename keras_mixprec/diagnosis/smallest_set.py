"""The smallest set of layers that a step is right with."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.end_to_end import loss_error
from keras_mixprec.keras_internals import own_non_trainable
from keras_mixprec.numerics.arrays import jittered, to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay


def smallest_set(
    ranked: Sequence[str], fits: Callable[[frozenset], bool]
) -> frozenset | None:
    """Returns a set of paths that fits and does not without any one of them.

    Nor without any two in one composite.

    First the shortest head of `ranked` that fits is sought, by doubling: from
    this side the model stays nearly all 16-bit, as it shall be in the end, so
    that few trials mix dtypes within a block. Then halves of it are taken out
    again as long as the rest fits, the last ranked first, and composites as a
    whole before their parts.

    Args:
        ranked: Paths, the one most needed in the set first.
        fits: Function of a set of paths. If a set fits, so do most that
            contain it.

    Returns:
        The set; `None` if not even all paths fit.
    """
    kept = _shortest_head(ranked, fits)
    if kept is None:
        return None
    least_first = [path for path in reversed(ranked) if path in kept]
    kept = _without(_groups(least_first, 0), 0, kept, fits)
    # One that had to stay while another was there may be spared by now; and
    # two whose results a composite combines, only together.
    for spared in [{path} for path in least_first] + _relatives(least_first):
        if spared <= kept and fits(kept - spared):
            kept -= spared
    return kept


def _shortest_head(ranked, fits):
    size = 0
    while not fits(frozenset(ranked[:size])):
        if size >= len(ranked):
            return None
        size = 2 * size or 1
    return frozenset(ranked[:size])


def _without(groups, depth, kept, fits):
    """Takes out of `kept` what it fits without, halving what it does not."""
    rest = kept.difference(*groups)
    if fits(rest):
        return rest
    if len(groups) > 1:
        middle = len(groups) // 2
        kept = _without(groups[:middle], depth, kept, fits)
        return _without(groups[middle:], depth, kept, fits)
    if len(groups[0]) > 1:
        parts = _groups(groups[0], depth + 1)
        return _without(parts, depth + 1, kept, fits)
    return kept


def _groups(paths, depth):
    """Paths that lie in one composite, at this depth of nesting, together."""
    groups = {}
    for path in paths:
        groups.setdefault(tuple(path.split("/")[: depth + 1]), []).append(path)
    return list(groups.values())


def _relatives(paths):
    """Each two paths of which one is in the other, or both in a third."""

    def parent(path):
        return path.rpartition("/")[0]

    return [
        {a, b}
        for a, b in itertools.combinations(paths, 2)
        if parent(a) == b or parent(b) == a or parent(a) == parent(b) != ""
    ]


def instability(call: LayerCall, scale: float) -> float:
    """Returns a layer's error as a multiple of the threshold for it.

    It runs again on the inputs it had, once in what it computes in now and
    once in float32, forward and backward; the larger of both counts.

    Args:
        call: `LayerCall` of a step in float32, at loss scale 1.
        scale: Float. The loss scale.
    """
    replay = LayerReplay(call)
    if nonfinite([to_array(x) for x in replay.inputs]):
        return 0.0
    forward = relative_error(replay.forward(), replay.forward("float32"))
    cotangents = _cotangents(call, scale)
    if not any(c.any() for c in cotangents):
        return forward / thresholds.FORWARD_ERROR
    backward = relative_error(
        replay.gradients(cotangents), replay.gradients(cotangents, "float32")
    )
    return max(
        forward / thresholds.FORWARD_ERROR, backward / thresholds.BACKWARD_ERROR
    )


def _cotangents(call, scale):
    pairs = zip(call.float_outputs, call.float_cotangents, strict=True)
    return [
        to_array(output) * 0.0 if found is None else to_array(found) * scale
        for output, found in pairs
    ]


class Needed:
    """Asks the whole step whether a demotion makes a difference.

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
        self._model = model
        self._data = data
        self._scale = scale
        self._loss = exact.loss
        self._noise: dict = {}
        # A gradient that moves nothing is no reason.
        self._gradients = {
            id(v): to_array(exact.gradients[id(v)])
            for v in model.trainable_variables
            if id(v) in exact.gradients
            and effective(v, to_array(exact.gradients[id(v)]))
        }

    def among(self, culprits: list[Culprit]) -> list[Culprit]:
        """Returns the culprits that the step is wrong without.

        Each with those of its layers that it takes. An output that is not
        finite stays one: a loss that ignores it in this batch may meet it in
        the next.

        Args:
            culprits: List of `Culprit`.
        """
        if not any(_shows_in_step(c) or len(c.layers) > 1 for c in culprits):
            return culprits
        repaired = self._errors(_layers_of(culprits))
        if repaired is None or not repaired.finite:
            return culprits
        self._find_unresolved()
        kept = list(culprits)
        for culprit in reversed(culprits):
            position = kept.index(culprit)
            others = kept[:position] + kept[position + 1 :]
            rest = _layers_of(others)
            if _shows_in_step(culprit) and self._as_right(rest, repaired):
                kept = others
                continue
            layers = self._without_needless(culprit, rest, repaired)
            kept[position] = culprit._replace(layers=layers)
        return kept

    def _without_needless(self, culprit, rest, repaired):
        layers = culprit.layers
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
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                other = exact_step(self._model, self._data, records=False)
            errors = self._errors_of(other)
            limits = {key: thresholds.RESOLVED_GRADIENT for key in errors}
            limits["loss"] = thresholds.LOSS_ERROR
            for key, error in errors.items():
                if error > max(limits[key], self._noise.get(key, 0.0)):
                    self._noise[key] = error

    def _as_right(self, demoted, repaired, path=None):
        errors = self._errors(demoted, path)
        return errors is not None and errors.as_right_as(repaired)

    def _errors(self, demoted, path=None):
        """How far the step is off, `None` if it does not run.

        `None` as well if the layer of the path returns non-finite numbers.
        """
        try:
            with computing_in("float32", demoted):
                step = dry_step(self._model, self._data, self._scale)
        # TensorFlow and torch refuse to mix some dtypes within a layer.
        except active.replay().REFUSALS:
            return None
        own = [c for c in step.calls if c.path == path]
        if any(nonfinite(map(to_array, c.float_outputs)) for c in own):
            return None
        errors = {
            key: self._resolved(key, error)
            for key, error in self._errors_of(step).items()
        }
        return _Errors(errors.pop("loss"), errors)

    def _errors_of(self, step):
        errors = {
            key: _gradient_error(step, key, exact)
            for key, exact in self._gradients.items()
        }
        return errors | {"loss": loss_error(step.loss, self._loss)}

    def _resolved(self, key, error):
        """An error, 0 where rounded weights alone do not do much less."""
        limit = thresholds.BEYOND_NOISE * self._noise.get(key, 0.0)
        return 0.0 if error <= limit and math.isfinite(error) else error


class _Errors(NamedTuple):
    """Shares by which the loss and each gradient are off."""

    loss: float
    gradients: dict

    @property
    def finite(self):
        return all(map(math.isfinite, [self.loss, *self.gradients.values()]))

    def as_right_as(self, other):
        """Whether nothing is off by more than it may be, or was anyhow."""
        before = other.gradients
        return self.loss <= max(
            thresholds.LOSS_ERROR, thresholds.AS_RIGHT * other.loss
        ) and all(
            error
            <= max(
                thresholds.RESOLVED_GRADIENT, thresholds.AS_RIGHT * before[key]
            )
            for key, error in self.gradients.items()
        )


def _gradient_error(step, key, exact):
    if key not in step.gradients:
        return math.inf
    low = to_array(step.gradients[key]) / np.float32(step.scale)
    return math.inf if nonfinite([low]) else relative_error([low], [exact])


def _layers_of(culprits):
    return [layer for culprit in culprits for layer in culprit.layers]


def _shows_in_step(culprit):
    """Whether the step would be wrong for it, as far as it matters.

    Not what is not finite with the cotangents of float32: with those of this
    batch that arrive in 16 bits it may just fit. Nor what is lost on the way
    to a loss that is still large.
    """
    numbers = culprit.numbers
    if "lost_share" in numbers:
        return False
    bad = numbers.get("nonfinite_outputs") or numbers.get("nonfinite_gradients")
    state = any(own_non_trainable(layer) for layer in culprit.layers)
    imprecise = culprit.kind in ("precision_loss", "underflow")
    return imprecise and not bad and not state
