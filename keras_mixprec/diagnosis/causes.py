"""Checks whether training has diverged, and finds the cause.

The search for the cause repeats steps from a good state in float32, with one
thing changed, and undoes them. A change that makes the loss fall shows the
cause.
"""

import contextlib
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.batch import nonfinite_rows, of_tensors, packed
from keras_mixprec.keras_internals import own_trainable
from keras_mixprec.numerics.arrays import (
    is_float,
    largest_magnitude,
    to_array,
)
from keras_mixprec.numerics.rehearsal import (
    NO_CHANGE,
    Change,
    Rehearsal,
    rates_of,
    rehearse,
    updating,
)
from keras_mixprec.policies.layers import walk_with_model


class Course(NamedTuple):
    """The state of training, in three numbers.

    Attributes:
        loss: Float. The loss in float32.
        weight: Float. The largest magnitude among the weights.
        rate: Float. The learning rate, or `None` if it is unknown.
    """

    loss: float
    weight: float
    rate: float | None = None

    @classmethod
    def of(cls, model, loss: float) -> "Course":
        """Returns the `Course` of a model, given its loss."""
        weights = (to_array(v.value) for v in model.trainable_variables)
        largest = max(map(largest_magnitude, weights), default=0.0)
        return cls(loss, largest, learning_rate(model))

    def left(self, start: "Course") -> bool:
        """Returns whether training has diverged since an earlier `Course`.

        Args:
            start: `Course` of the same model before.
        """
        # If the loss is unknown, only the weights can show a divergence.
        if math.isnan(start.loss):
            return self.weight >= thresholds.DIVERGED * start.weight > 0
        if not (start.loss and math.isfinite(start.loss)):
            return False
        if not math.isfinite(self.loss):
            return True
        loss = abs(self.loss / start.loss)
        both = loss * max(self.weight / (start.weight or math.inf), 1.0) ** 2
        if self.loss < start.loss:
            return False
        if loss >= thresholds.LOSS_DIVERGED:
            return True
        return loss >= thresholds.WORSE and both >= thresholds.BOTH_DIVERGED


def learning_rate(model) -> float | None:
    """Returns the largest learning rate in use, or `None` without one."""
    return max(rates_of(model).values(), default=None)


# The number of steps in a rehearsal.
STEPS = 8

# A rehearsal fails if its loss grows by more than this share of the first loss.
_FAILED = 1.0

# Inputs or targets above this limit count as not normalized. Normalized numbers
# are near 1.
_LARGE = 100.0

# The usual norm to clip gradients to.
_CLIP = 1.0

# The number of powers of ten by which the search tries to divide the learning
# rate.
_POWERS = 7


class _Trial(NamedTuple):
    """Steps with one thing changed.

    Attributes:
        batches: List of the batches to train on.
        change: `Change`.
        without: List of pairs of an object and the name of an attribute to set
            to `None` during the steps.
    """

    batches: list
    change: Change = NO_CHANGE
    without: list = []


def cause_of_divergence(model: keras.Model, kept, batch=None) -> dict:
    """Returns the cause of a divergence, as the numbers of a verdict.

    Args:
        model: A built and compiled `keras.Model`, as it is now.
        kept: List of `KeptState`s, the newest last.
        batch: The current batch, as `train_step` takes it. Defaults to `None`:
            the steps use only the batch of each kept state.

    Returns:
        Dict with the evidence and a `"cause"`, one of `"penalty"`, `"inputs"`,
        `"targets"`, `"learning_rate"` and `"gradients"`. Empty if no change
        prevents the divergence, or the model does not diverge in these steps.
    """
    rates = rates_of(model)
    for own in reversed(kept):
        batches = [own.batch]
        if batch is not None and batch is not own.batch:
            batches.append(batch)
        batches = [of_tensors(b, model) for b in batches]
        batches = [b for b in batches if not nonfinite_rows(batch=b)]
        if not batches:
            continue
        with own.state.in_place():
            search = _Search(model, batches, rates)
            if search.fails():
                found = search.cause()
                since = {"since": own.step, **_raised(rates, own.rates)}
                return found | since if found else {}
    return {}


def is_good(model: keras.Model, own) -> bool:
    """Returns whether training from a kept state does not fail.

    Args:
        model: As for `cause_of_divergence`.
        own: A `KeptState`.
    """
    with own.state.in_place():
        batch = of_tensors(own.batch, model)
        if nonfinite_rows(batch=batch):
            return False
        search = _Search(model, [batch], rates_of(model))
        # If no step can be taken, nothing is known.
        return not search.fails() and search.knows_loss


def _raised(rates, before):
    """Returns the earlier learning rate if the rate has been raised since."""
    now, then = max(rates.values(), default=0), max(before.values(), default=0)
    return {"learning_rate_before": then} if now > then else {}


class _Search:
    def __init__(self, model, batches, rates):
        self._model = model
        self._batches = batches
        self._rates = rates
        self._loss = math.nan

    def fails(self):
        """Returns whether training fails in the steps from here."""
        usual = self._rehearse(_Trial(self._batches))
        self._loss = usual.first[0]
        grows = usual.growth > _FAILED or usual.peak > thresholds.DIVERGED
        return math.isfinite(self._loss) and grows

    @property
    def knows_loss(self):
        return math.isfinite(self._loss)

    def cause(self):
        """Returns the numbers of the change that lets the loss fall, if any."""
        for name, numbers, trial in self._parts():
            if self._cures(trial):
                return {"cause": name, **numbers}
        by_rate, by_clip = self._by_rate(), self._by_clipping()
        if not (by_rate or by_clip):
            return {}
        name = "learning_rate" if by_rate else "gradients"
        return {"cause": name, **by_rate, **by_clip}

    def _rehearse(self, trial) -> Rehearsal:
        with contextlib.ExitStack() as stack:
            for owner, name in trial.without:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, None)
            times = STEPS // len(trial.batches)
            return rehearse(
                self._model, trial.batches, times, self._rates, trial.change
            )

    def _cures(self, trial):
        return self._rehearse(trial).growth < 0

    def _by_rate(self):
        """Finds the smallest power of ten by which to divide the rate."""
        rate = max(self._rates.values(), default=0.0)
        wrong, right = 0, _POWERS
        while rate and right - wrong > 1:
            power = (wrong + right) // 2
            change = Change(rate=10.0**-power)
            if self._cures(_Trial(self._batches, change)):
                right = power
            else:
                wrong = power
        if right == _POWERS:
            return {}
        return {"learning_rate": rate, "holds": rate * 10.0**-right}

    def _by_clipping(self):
        optimizers = updating(self._model)
        trial = _Trial(self._batches, Change(clip=_CLIP))
        cures = not any(map(_clips, optimizers)) and self._cures(trial)
        return {"clip": _CLIP} if cures else {}

    def _parts(self):
        """Yields each part that may be at fault, with a trial without it."""
        added, without = {}, []
        for entry in walk_with_model(self._model):
            own = [v for v in own_trainable(entry.layer) if v.regularizer]
            without += [(v, "regularizer") for v in own]
            of_outputs = entry.layer.activity_regularizer
            if of_outputs:
                without.append((entry.layer, "activity_regularizer"))
            if own or of_outputs:
                sizes = (float(to_array(v.regularizer(v))) for v in own)
                added[entry.path] = sum(sizes)
        if without:
            numbers = {"largest_of": max(added, key=added.__getitem__)}
            yield "penalty", numbers, _Trial(self._batches, without=without)
        for place, part in enumerate(("inputs", "targets")):
            largest = max(_largest(batch, place) for batch in self._batches)
            if largest > _LARGE:
                batches = [_normalized(b, place) for b in self._batches]
                yield part, {f"largest_of_{part}": largest}, _Trial(batches)


def _clips(optimizer):
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    return any(getattr(optimizer, name, None) is not None for name in names)


def _largest(batch, place):
    part = keras.utils.unpack_x_y_sample_weight(batch)[place]
    leaves = filter(is_float, tree.flatten(part))
    return max((largest_magnitude(to_array(x)) for x in leaves), default=0.0)


def _normalized(batch, place):
    """Returns a batch with one part scaled to mean 0 and deviation 1."""
    parts = [*keras.utils.unpack_x_y_sample_weight(batch)]
    parts[place] = tree.map_structure(_standard, parts[place])
    return packed(tuple(parts), like=batch)


def _standard(leaf):
    if not is_float(leaf):
        return leaf
    array = to_array(leaf)
    axes = tuple(range(max(array.ndim - 1, 1)))
    spread = array.std(axes, keepdims=True)
    array = (array - array.mean(axes, keepdims=True)) / np.maximum(spread, 1e-6)
    return ops.convert_to_tensor(array, dtype=leaf.dtype)
