"""Whether an update depends on the loss scale, which it must not.

Two float32 steps at two loss scales, with the same draws, give an optimizer the
same unscaled gradients, unless the code around it is at fault. Both scales are
powers of two, by which float32 multiplies without rounding.
"""

import functools
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.end_to_end import is_finite
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.numerics.arrays import (
    is_float,
    largest_magnitude,
    restoring,
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
from keras_mixprec.numerics.untouched import holding_zeros
from keras_mixprec.policies.layers import MODEL_PATH, has_own_step

# The order of steps at the first and at the second scale: whatever a step does
# otherwise every second, third or fourth time shows as a difference of steps
# at the same scale.
_ORDER = (0, 1, 1, 0, 0)

# Of gradients whose largest is this, float16 at scale 1 rounds all but those
# below a 2**14th of it. A few such roundings are no difference of this size.
_NORMAL, _ROUNDED = 2.0**-10, 0.05

# Batches whose gradients a step may add up before it applies them.
_MOST_BATCHES = 8


class ScaleUse(NamedTuple):
    """How a step uses the loss scale.

    Attributes:
        by_hand: Boolean. Whether it multiplies the loss without `scale_loss`.
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
    with repeated_draws():
        return _scale_use(model, data, exact)


def _scale_use(model, data, exact):
    scale = scale_in_use(model)
    bits = round(scale.bits)
    if not bits and scale.scales and not scale.adapts:
        return ScaleUse()  # It scales by 1 at all steps.
    if bits <= 0:  # A scale below 1 would take small gradients to zero.
        bits = thresholds.USUAL_SCALE_BITS
    if exact is None:
        comparison = _Comparison(model, data, None, bits)
        first = comparison.once(0)
        if not _off(first, comparison.once(1)):
            return comparison.of_other_steps(first)
        exact = exact_step(model, data)
    if not is_finite(exact):
        return ScaleUse()
    return _Comparison(model, data, exact, bits).use()


class _Comparison:
    def __init__(self, model, data, exact, bits):
        self._model = model
        self._data = data
        self._exact = exact
        self._bits = bits
        self._calls = {}
        self._variables = {
            id(v): v
            for v in model.trainable_variables
            if not getattr(v, "overwrite_with_gradient", False)
        }

    def use(self):
        first = self._unscaled(self._exact, 0)
        second = self._fitting(first)
        if second is None or not first | second:
            return ScaleUse()
        by_hand = not self._exact.scales
        off = _off(first, second)
        if not off:
            return self.of_other_steps(first, by_hand)
        if not self._is_certain(off, first):
            return self._of_next_step(first, by_hand)
        # The step that was given may have drawn other numbers.
        self._exact = exact_step(self._model, self._data)
        first = self._unscaled(self._exact, 0)
        off = _off(first, second)
        if not off:  # Only those did.
            return ScaleUse(by_hand)
        return ScaleUse(False, *self._fault(off, first, second))

    def of_other_steps(self, first, by_hand=False):
        """What is wrong where two scales give a step the same gradients.

        Args:
            first: Dict of them.
            by_hand: As in `ScaleUse`. Defaults to `False`.
        """
        found = self._of_overflow(first, by_hand)
        return found if found.case else self._of_next_step(first, by_hand)

    def _of_next_step(self, first, by_hand):
        """Whether a step depends on the scale of steps before it.

        A loop that adds up the gradients of several batches does not: it
        empties its variables when it applies them, and the scale does not move
        before. So one of the next steps no longer depends on the scale.
        """
        use = ScaleUse(by_hand)
        if not (has_own_step(self._model) and self._kept()):
            return use
        for count in range(1, _MOST_BATCHES + 1):
            found = self._after(0, count), self._after(1, count)
            if None in found or not (off := _off(*found)):
                return use
        if not self._differs(self._after):
            return use
        numbers = {"variables": len(off), "variables_in_all": len(first)}
        return ScaleUse(False, "keeps_scaled", numbers)

    def _after(self, place, count=1):
        """The gradients of a step that follows others at a scale, as `once`.

        `None` if one of these gives the optimizer none: the scale stays.
        """
        scale = 2.0 ** (self._bits * place)
        variables = self._model.non_trainable_variables
        with restoring(variables):
            for _ in range(count):
                step = exact_step(self._model, self._data, scale, records=False)
                if not step.gradients:
                    return None
                for variable in variables:
                    if id(variable) in step.state:
                        variable.assign(step.state[id(variable)])
            return self.once(0)

    def _of_overflow(self, first, by_hand):
        """Whether an infinite loss gives the optimizer finite gradients."""
        moving = {k for k, g in first.items() if largest_magnitude(g)}
        with in_float32(self._model), overflowing():
            step = single_step(self._model, self._data, 1.0)
        found = [g for k, g in step.gradients.items() if k in moving]
        hidden = step.scales and found and not nonfinite(map(to_array, found))
        if by_hand or not hidden:
            return ScaleUse(by_hand)
        numbers = {"variables": len(found), "variables_in_all": len(first)}
        return ScaleUse(False, "hides_overflow", numbers)

    def once(self, place):
        """The gradients of a step at the first scale (0) or the second."""
        bits = self._bits * place
        with in_float32(self._model):
            step = single_step(self._model, self._data, 2.0**bits)
        return self._unscaled(step, bits)

    def _fitting(self, first):
        """The gradients at the other scale, a nearer one if some overflow."""
        while self._bits:
            step = exact_step(self._model, self._data, 2.0**self._bits)
            found = self._unscaled(step, self._bits)
            if all(_fits(found[key], first.get(key)) for key in found):
                self._calls = {call.name: call for call in step.calls}
                return found
            self._bits = int(self._bits / 2)
        return None

    def _unscaled(self, step, bits):
        return {
            key: to_array(gradient) * np.float32(2.0**-bits)
            for key, gradient in step.gradients.items()
            if key in self._variables
        }

    def _is_certain(self, off, first):
        """Whether nothing else makes the difference that was seen."""
        if not self._differs(self.once):
            return False
        if not _is_beyond_float16(off, first) and self._has_float16():
            return False
        if not has_own_step(self._model):
            return True
        # It may keep scaled gradients of steps before this one.
        kept = self._kept()
        shapes = {tuple(v.shape) for v in self._variables.values()}
        with restoring(kept), holding_zeros(self._model, shapes):
            for variable in kept:
                variable.assign(keras.ops.zeros_like(variable.value))
            return self._differs(self.once)

    def _differs(self, run):
        """Whether steps differ by more than those at the same scale do.

        Args:
            run: Function of the place of a scale, as `once`.
        """
        found = [[], []]
        for place in _ORDER:
            found[place].append(run(place))
        (one, *ones), (other, another) = found
        off = _off(one, other)
        spread = {}
        for pair in ((one, ones[0]), (one, ones[1]), (other, another)):
            for key, error in _off(*pair).items():
                spread[key] = max(error, spread.get(key, 0.0))
        times = thresholds.SCALE_SPREADS
        return any(e > times * spread.get(k, 0.0) for k, e in off.items())

    def _has_float16(self):
        """Whether the code has float16 of its own on the way of gradients.

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

    def _kept(self):
        """What a step of the user's own may keep gradients in."""
        shapes = {tuple(v.shape) for v in self._variables.values()}
        return [
            v
            for v in self._model.non_trainable_variables
            if "float" in v.dtype and tuple(v.shape) in shapes
        ]

    def _fault(self, off, first, second):
        """The case, and the evidence."""
        bits = self._bits
        numbers = {
            "compared_at_bits": bits,
            "gradient_error": max(off.values()),
            "variables": len(off),
            "variables_in_all": len(first | second),
            "first": self._variables[next(iter(off))].path,
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
            case = "gradient_in_loss" if constant else "part_of_loss"
        else:
            # Gradients that do not depend on the scale at all are divided.
            added = not constant and self._is_added(first, second)
            case = "part_added" if added else "before_unscaling"
        return case, numbers

    def _is_added(self, first, second):
        """Whether a part that is not scaled is added to one that is."""
        bits = int(self._bits / 2)
        step = exact_step(self._model, self._data, 2.0**bits, records=False)
        third, s2, s3 = {}, 2.0**-self._bits, 2.0**-bits
        for key, one in first.items():
            part = (one - second.get(key, 0.0)) / (1.0 - s2)
            third[key] = one - part * (1.0 - s3)
        return not _off(third, self._unscaled(step, bits))

    def _behind(self):
        """The layer behind which gradients do not follow the scale any more.

        The model if that is the last one, `None` if those of all outputs do.
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


def _off(one, other):
    """The errors of those arrays that differ, by key."""
    errors = {}
    for key in one | other:
        pair = [arrays.get(key, np.zeros(())) for arrays in (one, other)]
        size = max(map(largest_magnitude, pair))
        if size < thresholds.LEAST_GRADIENT:
            continue
        # In units of the largest, so that no square underflows.
        low, exact = (np.broadcast_arrays(*pair)[i] / size for i in (0, 1))
        error = relative_error([low], [exact])
        if error > thresholds.SCALE_ERROR:
            errors[key] = min(error, relative_error([exact], [low]))
    return {k: e for k, e in errors.items() if e > thresholds.SCALE_ERROR}


def _is_beyond_float16(off, first):
    """Whether rounding to float16 at scale 1 makes no such difference."""
    sizes = [largest_magnitude(first.get(key, np.zeros(1))) for key in off]
    return min(sizes) >= _NORMAL and min(off.values()) > _ROUNDED


def _fits(array, exact):
    wide = exact is not None and np.isfinite(exact).all()
    return np.isfinite(array).all() or not wide


def _narrow(seen, inputs, outputs):
    floats = filter(is_float, outputs)
    standard = keras.backend.standardize_dtype
    seen += [to_array(x) for x in floats if standard(x.dtype) == "float16"]
