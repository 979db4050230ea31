"""Checks that an update does not depend on the loss scale.

In float32, with the same draws, two loss scales give the same updates unless
the code around the optimizer is at fault. Both scales are powers of two, so
float32 multiplies without rounding. If Keras' own code handles the gradients,
one step is enough to compare. If the user's code does, several steps are
compared.
"""

import functools
import math
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.criterion import is_finite
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.taken_steps import TakenSteps
from keras_mixprec.numerics.arrays import (
    count_nonfinite,
    is_float,
    largest_magnitude,
    to_array,
)
from keras_mixprec.numerics.dry_step import (
    DryStep,
    exact_step,
    single_step,
    step_held_at,
)
from keras_mixprec.numerics.held_optimizer import is_scaling, overflowing
from keras_mixprec.numerics.layer_hooks import in_float32
from keras_mixprec.numerics.random_numbers import repeated_draws
from keras_mixprec.numerics.taken_steps import StepTaker
from keras_mixprec.policies.layers import MODEL_PATH, has_own_step

# The order of runs at the first and at the second scale. Code that acts every
# second, third or fourth time then shows as a difference between runs at the
# same scale.
_ORDER = (0, 1, 1, 0, 0)

# If the largest gradient is this large, float16 at scale 1 rounds only
# gradients below a 2**14th of it. A few such roundings make no difference of
# this size.
_NORMAL, _ROUNDED = 2.0**-10, 0.05


class ScaleUse(NamedTuple):
    """How a step uses the loss scale.

    Attributes:
        by_hand: Boolean, whether it multiplies the loss without `scale_loss`.
        case: String. The sentence of the advice, `None` if all is well.
        numbers: Dict. The evidence.
    """

    by_hand: bool = False
    case: str | None = None
    numbers: dict = {}


def scale_use(
    model: keras.Model, data, exact: DryStep | None = None
) -> ScaleUse:
    """Returns how the step of a model uses the loss scale.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of it in float32, at loss scale 1. Defaults to `None`:
            it is made only if steps that cost less differ.
    """
    if not any(map(is_scaling, optimizers_of(model).values())):
        return ScaleUse()
    scale = scale_in_use(model)
    bits = round(scale.bits)
    if not bits and scale.scales and not scale.adapts:
        return ScaleUse()  # The scale is always 1.
    if bits <= 0:  # A scale below 1 would take small gradients to zero.
        bits = thresholds.USUAL_SCALE_BITS
    own = _handles_gradients(model) and StepTaker(model).can_take()
    with repeated_draws():
        kind = _ManySteps if own else _OneStep
        return kind(model, data, exact, bits, scale.adapts).use()


def _handles_gradients(model):
    """Returns whether the user's own code handles gradients."""
    classes = map(type, optimizers_of(model).values())
    tops = {cls.__module__.partition(".")[0] for cls in classes}
    return has_own_step(model) or not tops <= {"keras", "keras_mixprec"}


class _Comparison:
    """The results of training at two loss scales.

    Args:
        model: As for `scale_use`.
        data: As for `scale_use`.
        exact: As for `scale_use`.
        bits: Int. The larger scale, as a power of two. The other one is 1.
        adapts: Boolean, whether the loss scale adapts itself to gradients.
    """

    def __init__(self, model, data, exact, bits, adapts):
        self._given = model, data, exact, bits, adapts
        self._model, self._data, self._exact, self._bits, self._adapts = (
            self._given
        )

    def use(self):
        """Returns the `ScaleUse`."""
        if not (other := self._fitting()):
            return ScaleUse()
        if off := _off(self.one, other):
            held = _HeldSteps(self._model, self._data, self._bits)
            if not held.are_finite:
                return ScaleUse()
            if self._is_certain(off, held):
                return ScaleUse(False, *self._fault(off, held))
        case, count = self._at_overflow()
        if not count:
            exact = self._exact
            return ScaleUse(exact is not None and not exact.scales)
        in_all = len(self._model.trainable_variables)
        numbers = {"variables": count, "variables_in_all": in_all}
        return ScaleUse(False, case, numbers)

    def _fitting(self):
        """Returns the results at the other scale, or at a smaller one."""
        while self._bits:
            other = self._at_other()
            if other and all(
                _fits(x, self.one.get(k)) for k, x in other.items()
            ):
                return other
            self._bits = int(self._bits / 2)
        return None

    def _is_certain(self, off, held):
        """Returns whether the loss scale alone makes the difference."""
        if not self._differs():
            return False
        is_seen = _is_beyond_float16(held.off or off, held.first)
        return is_seen or not held.have_float16()

    def _differs(self):
        """Returns whether runs differ by more than runs at one scale do."""
        runs = [*map(self._again, _ORDER[:2])]
        off, spread = _off(*runs), {}
        for place in _ORDER[2:]:
            for key, error in _off(runs[place], self._again(place)).items():
                spread[key] = max(error, spread.get(key, 0.0))
        times = thresholds.SCALE_SPREADS
        return any(e > times * spread.get(k, 0.0) for k, e in off.items())


class _OneStep(_Comparison):
    """The gradients that a step hands to the optimizers, which are held."""

    @functools.cached_property
    def one(self):
        if self._exact is None:
            return self._again(0)
        return _unscaled(self._model, self._exact, 0)

    def _at_other(self):
        if self._exact is None:
            return self._again(1)
        # Recorded, as the step that was given: one program on JAX.
        step = exact_step(self._model, self._data, 2.0**self._bits)
        return _unscaled(self._model, step, self._bits)

    def _again(self, place):
        bits = self._bits * place
        with in_float32(self._model):
            step = single_step(self._model, self._data, 2.0**bits)
        return _unscaled(self._model, step, bits)

    def _fault(self, off, held):
        return held.fault()

    def _at_overflow(self):
        """Returns the case at an infinite loss, and the number of variables."""
        with in_float32(self._model), overflowing():
            step = single_step(self._model, self._data, 1.0)
        moving = [k for k, g in self.one.items() if largest_magnitude(g)]
        found = [step.gradients[k] for k in moving if k in step.gradients]
        finite = [g for g in found if not nonfinite([to_array(g)])]
        # Other optimizers of a step of the user's own may not scale the loss.
        some = len(finite) < len(found) and has_own_step(self._model)
        hidden = step.scales and not some
        return "hides_overflow", len(finite) * hidden


class _ManySteps(_Comparison):
    """What consecutive steps change."""

    _count: int | None = None

    @functools.cached_property
    def _first(self):
        return self._take(None)

    @property
    def one(self):
        return self._first.changes

    def use(self):
        if any(map(largest_magnitude, self.one.values())):
            return super().use()
        # A learning rate of 0, or a step that JAX cannot trace.
        return _OneStep(*self._given).use()

    def _take(self, *how):
        with in_float32(self._model):
            return TakenSteps(self._model, self._data, *how)

    def _at_other(self):
        found = self._take(self._bits, self._first.count)
        # Skipped, and not for what the code makes of the scaled gradients.
        overflowed = any(count.any() for count in found.overflows.values())
        skipped = overflowed and found.updates != self._first.updates
        return None if skipped else found.changes

    def _again(self, place):
        # Gradients that are kept now are multiplied by the scale that it has.
        bits = self._bits if place else None
        goes_on = any(self._first.updates.values())
        found = self._take(bits, self._count, goes_on)
        self._count = found.count
        return found.changes

    def _fault(self, off, held):
        if held.off:
            return held.fault()
        weights = [id(v) for v in self._model.trainable_variables]
        numbers = {
            "compared_at_bits": self._bits,
            "variables": sum(key in off for key in weights),
            "variables_in_all": len(weights),
        }
        return "over_steps", numbers

    def _at_overflow(self):
        found = self._take(math.inf, self._first.count)
        weights = [id(v) for v in self._model.trainable_variables]
        finite = [k for k in weights if not count_nonfinite(self.one[k])]
        if lost := sum(bool(count_nonfinite(found.changes[k])) for k in finite):
            return "writes_overflow", lost
        updated = [key for key, count in self._first.updates.items() if count]
        return "hides_overflow", sum(self._unseen(k, found) for k in updated)

    def _unseen(self, key, found):
        """How many gradients an optimizer does not see overflow."""
        usual, given = self._first.given.get(key, []), found.given.get(key)
        if given is None:  # The optimizer did not apply these gradients.
            handled = found.raised or key in found.rescaled or not self._adapts
            return 0 if handled else len(usual)
        if found.updates[key]:
            return len(given)
        dropped = sum(a > b for a, b in zip(usual, given, strict=False))
        norms = self.one.get((key, "gradient_norms"))
        if dropped or found.raised or norms is None:
            return dropped
        overflows = found.overflows[key, "overflows"]
        return int(((norms > 0) & (overflows == 0)).sum())


class _HeldSteps:
    """Two steps with held optimizers, and why their gradients differ.

    Args:
        model: As for `scale_use`.
        data: As for `scale_use`.
        bits: As for `_Comparison`.
    """

    def __init__(self, model, data, bits):
        self._model, self._data, self._bits = model, data, bits
        self._exact, other = exact_step(model, data), self._step(bits)
        self.are_finite = is_finite(self._exact)
        self.first = _unscaled(self._model, self._exact, 0)
        self._second = _unscaled(self._model, other, bits)
        self.off = _off(self.first, self._second)
        self._calls = {call.name: call for call in other.calls}

    def _step(self, bits, records=True):
        scale = 2.0**bits
        return exact_step(self._model, self._data, scale, records=records)

    def have_float16(self):
        """Returns whether the code computes gradients in float16 of its own.

        Which small ones survive at one scale and not at another.
        """
        one, other = [], []
        for bits, seen in ((0, one), (self._bits, other)):
            with (
                in_float32(self._model),
                step_held_at(self._model, self._data, 2.0**bits) as run,
            ):
                visit = functools.partial(_narrow, seen)
                active.replay().each_operation(run, [], visit)
        same = map(np.array_equal, one, other)
        return len(one) != len(other) or not all(same)

    def fault(self):
        """The case, and the evidence."""
        if not self.off:  # The difference came from random numbers.
            return None, {}
        bits, first, second = self._bits, self.first, self._second
        paths = {id(v): v.path for v in self._model.trainable_variables}
        numbers = {
            "compared_at_bits": bits,
            "gradient_error": max(self.off.values()),
            "variables": len(self.off),
            "variables_in_all": len(first | second),
            "first": paths[next(iter(self.off))],
        }
        behind = self._behind()
        if behind:
            numbers["behind"] = behind
        raw = {key: array * 2.0**bits for key, array in second.items()}
        squared = {key: array * 2.0**-bits for key, array in second.items()}
        constant, twice = not _off(first, raw), not _off(first, squared)
        if twice:
            case = "scaled_twice"
        elif constant and not self._exact.scales:
            case = "never_scaled"
        elif behind:
            case = "part_of_loss"
        else:
            # Gradients that do not depend on the scale at all are divided.
            added = not constant and self._is_added()
            case = "part_added" if added else "before_unscaling"
        return case, numbers

    def _is_added(self):
        """Returns whether a part that is not scaled is added to one that is."""
        bits = int(self._bits / 2)
        step = self._step(bits, records=False)
        third, s2, s3 = {}, 2.0**-self._bits, 2.0**-bits
        for key, one in self.first.items():
            part = (one - self._second.get(key, 0.0)) / (1.0 - s2)
            third[key] = one - part * (1.0 - s3)
        return not _off(third, _unscaled(self._model, step, bits))

    def _behind(self):
        """The layer behind which gradients do not follow the scale any more.

        The model if it is the last one, `None` if the gradients of all outputs
        do.
        """
        follow = {}
        for call in self._exact.calls:
            other = self._calls.get(call.name)
            pairs = [] if other is None else self._cotangents(call, other)
            if any(largest_magnitude(one) for one, _ in pairs):
                off = [_off({0: one}, {0: two}) for one, two in pairs]
                follow[call.name] = call.path, not any(off)
        wrong = [name for name, (_, right) in follow.items() if not right]
        if not wrong:
            return None
        is_last = wrong[-1] == list(follow)[-1]
        return MODEL_PATH if is_last else follow[wrong[-1]][0]

    def _cotangents(self, call, other):
        factor = np.float32(2.0**-self._bits)
        return [
            (to_array(one), to_array(two) * factor)
            for one, two in zip(call.cotangents, other.cotangents, strict=False)
            if one is not None and two is not None
        ]


def _unscaled(model, step, bits):
    # Some are not of the loss: what a variable shall be from now on.
    others = {
        id(v)
        for v in model.trainable_variables
        if getattr(v, "overwrite_with_gradient", False)
    }
    return {
        key: to_array(gradient) * np.float32(2.0**-bits)
        for key, gradient in step.gradients.items()
        if key not in others
    }


def _off(one, other):
    """The errors of those arrays that differ, by key."""
    errors = {}
    for key in one | other:
        pair = [arrays.get(key, np.zeros(())) for arrays in (one, other)]
        size = max(map(largest_magnitude, pair))
        if size < thresholds.LEAST_GRADIENT:
            continue
        # Divide by the largest value, so that no square underflows.
        low, exact = (np.broadcast_arrays(*pair)[i] / size for i in (0, 1))
        error = relative_error([low], [exact])
        if error > thresholds.SCALE_ERROR:
            errors[key] = min(error, relative_error([exact], [low]))
    return {k: e for k, e in errors.items() if e > thresholds.SCALE_ERROR}


def _is_beyond_float16(off, first):
    """Returns whether rounding to float16 cannot make this difference."""
    sizes = [largest_magnitude(first.get(key, np.zeros(1))) for key in off]
    return min(sizes) >= _NORMAL and min(off.values()) > _ROUNDED


def _fits(array, exact):
    wide = exact is not None and np.isfinite(exact).all()
    return np.isfinite(array).all() or not wide


def _narrow(seen, inputs, outputs):
    floats = filter(is_float, outputs)
    standard = keras.backend.standardize_dtype
    seen += [to_array(x) for x in floats if standard(x.dtype) == "float16"]
