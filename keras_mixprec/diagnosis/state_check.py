"""Finds moving averages that stop moving because of 16-bit rounding.

The change of a moving average soon becomes less than half of its last 16-bit
digit, and it stops. This shows where it is now, or near the value that it
approaches.
"""

import contextlib

import ml_dtypes
import numpy as np
from keras import ops

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import relative_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import own_non_trainable, widened
from keras_mixprec.numerics.arrays import restoring, to_array
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.policies.layers import walk_with_model

_DTYPES = ("float16", ml_dtypes.bfloat16)


class StateCheck:
    """Compares what a step changes in variables that are not trained.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1.
        demoted: List of the layers that are demoted so far.
    """

    def __init__(self, model, data, exact: DryStep, demoted: list):
        self._model = model
        self._data = data
        self._exact = exact
        self._demoted = demoted

    def culprits(self, step: DryStep) -> list[Culprit]:
        """Returns the layers whose variables stand still in 16 bits.

        Args:
            step: `DryStep` of the batch in 16 bits.
        """
        rounded = [v for v in self._model.variables if self._rounds(v, step)]
        lost = self._lost(rounded) if rounded else {}
        return [
            self._culprit(entry, lost, step)
            for entry in walk_with_model(self._model)
            if _lost_of(entry.layer, lost)
        ]

    def _lost(self, variables):
        """The errors of what loses its change, by id."""
        places, lost = self._places(variables), {}
        # The value now, and one near the value that it approaches.
        for place in zip(*places, strict=True):
            there = [
                (v, _as_stored(v, x))
                for v, x in zip(variables, place, strict=True)
                if x is not None
            ]
            for key, error in self._errors(there).items():
                if error > thresholds.LOST_CHANGE:
                    lost.setdefault(key, error)
        return lost

    def _culprit(self, entry, lost, step):
        own = _lost_of(entry.layer, lost)
        layers = with_sublayers(entry.layer)
        fault = "precision_loss", "update"
        numbers = {"error_of_change": max(own.values())}
        for variable in own_non_trainable(entry.layer):
            if id(variable) in own and id(variable) not in step.state:
                numbers["not_written"] = variable.path
        return Culprit(entry.path, layers, *fault, numbers)

    def _rounds(self, variable, step):
        """Returns whether a step rounds a variable to 16 bits, or leaves it.

        On torch, a float16 layer assigns to the cast copy of a variable, which
        is lost.
        """
        # A policy cannot add digits to a variable that is stored in 16 bits.
        if variable.dtype in SIXTEEN_BITS or not self._changes(variable, step):
            return False
        now = to_array(variable.value)
        low = _after(step, variable, now)
        return _is_16_bit(low) or (low == now).all()

    def _changes(self, variable, step):
        """Returns whether float32 changes it, and 16 bits leave it finite."""
        is_float = "float" in variable.dtype
        if not is_float or id(variable) not in self._exact.state:
            return False
        now = to_array(variable.value)
        low, wide = (_after(s, variable, now) for s in (step, self._exact))
        return (wide != now).any() and np.isfinite(low).all()

    def _places(self, variables):
        """For each variable the values to see a step at, as for `_places`."""
        begins = [to_array(v.value) for v in variables]
        firsts = [to_array(self._exact.state[id(v)]) for v in variables]
        # A variable stored in 16 bits would lose the first step here, too.
        with (
            widened(variables, SIXTEEN_BITS),
            _set_to(zip(variables, firsts, strict=True)),
        ):
            step = exact_step(self._model, self._data, records=False)
        seconds = [to_array(step.state[id(v)]) for v in variables]
        return [*map(_places, begins, firsts, seconds)]

    def _errors(self, pairs):
        """The errors of the changes from there on, by id of the variable."""
        if not pairs:
            return {}
        with _set_to(pairs):
            exact = exact_step(self._model, self._data, records=False)
            with computing_in("float32", self._demoted):
                low = dry_step(self._model, self._data, 1.0, records=False)
        return {
            id(v): relative_error(
                [_after(low, v, value) - value],
                [_after(exact, v, value) - value],
            )
            for v, value in pairs
        }


def _as_stored(variable, value):
    """A float32 array as a variable of 16 bits, or of 32, holds it."""
    return to_array(ops.cast(value, variable.dtype))


def _after(step, variable, now):
    """Returns a variable's value after a step, which may not have set it."""
    state = step.state.get(id(variable))
    return now if state is None else to_array(state)


def _lost_of(layer, lost):
    own = map(id, own_non_trainable(layer))
    return {key: lost[key] for key in own if key in lost}


def _is_16_bit(array):
    with np.errstate(over="ignore"):
        return any((array == array.astype(d)).all() for d in _DTYPES)


def _places(begin, first, second):
    """Returns the values to check a step at: now, and close to the limit.

    As an average that goes the same share of its way at each step. `None` in
    place of the first if it is there but for roundings, in place of the second
    if it is close already, or resolves nowhere, as a counter.
    """
    change = first - begin
    size = float(np.square(change, dtype="float64").sum())
    share = 1 - float((change * (second - first)).sum(dtype="float64")) / size
    if share < thresholds.SETTLING_SHARE:
        return begin, None
    end = begin + change / share
    left = float(np.linalg.norm(end - begin))
    size = float(np.linalg.norm(end))
    close = thresholds.FORWARD_ERROR * size
    ahead = end + (begin - end) * (close / left) if left > close else None
    return begin if left > thresholds.SETTLED_STATE * size else None, ahead


@contextlib.contextmanager
def _set_to(pairs):
    """Context that gives variables other values."""
    pairs = list(pairs)
    with restoring([variable for variable, _ in pairs]):
        for variable, value in pairs:
            variable.assign(value)
        yield
