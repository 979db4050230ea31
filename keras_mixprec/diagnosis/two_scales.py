"""Checks that an update does not depend on the loss scale.

In float32 and with the same random numbers, two loss scales give the same
updates unless the code around the optimizer is at fault. Both scales are powers
of two, so float32 multiplies by them without rounding. If only Keras' own code
handles the gradients, the check compares one step. Otherwise it compares
several steps.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.criterion import (
    is_finite,
    nonfinite,
    relative_error,
)
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.keras_internals import micro_batches, stored_value
from keras_mixprec.loss_scaling.rules import FixedLossScale
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
from keras_mixprec.numerics.held_optimizer import (
    instead_of_optimizers,
    is_scaling,
    overflowing,
    with_wrapped,
)
from keras_mixprec.numerics.layer_hooks import in_float32
from keras_mixprec.numerics.random_numbers import repeated_draws
from keras_mixprec.numerics.rehearsal import StepTaker
from keras_mixprec.policies.layers import MODEL_PATH, has_own_step

# The order of test runs at the first loss scale (0) and the second (1). With
# this order, code that acts only every second, third or fourth time differs
# between runs at the same scale too, and is not blamed.
_ORDER = (0, 1, 1, 0, 0)

# If the largest gradient is this large, float16 at scale 1 rounds only
# gradients below a 2**14th of it. A few such roundings cannot make a difference
# of this size.
_NORMAL, _ROUNDED = 2.0**-10, 0.05


class ScaleUse(NamedTuple):
    """How a step uses the loss scale.

    Attributes:
        by_hand: Boolean, whether the step scales the loss without `scale_loss`.
        case: String. The case for `scale_advice`, or `None` if there is no
            fault.
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
        exact: `DryStep` of the batch in float32, at loss scale 1. Defaults to
            `None`. Then the check starts with cheaper steps without a record.
    """
    if not any(map(is_scaling, optimizers_of(model).values())):
        return ScaleUse()
    scale = scale_in_use(model)
    bits = round(scale.bits)
    if not bits and scale.scales and not scale.adapts:
        return ScaleUse()  # The loss scale is always 1.
    if bits <= 0:  # Small gradients would underflow at a scale below 1.
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
    """Compares the results of training at two loss scales.

    Args:
        model: As for `scale_use`.
        data: As for `scale_use`.
        exact: As for `scale_use`.
        bits: Int. The larger scale, as a power of two. The other scale is 1.
        adapts: Boolean, whether the loss scale is dynamic.
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
            if self._differs() and held.cannot_be_rounding(off):
                found = held.fault() if held.off else self._over_steps(off)
                return ScaleUse(False, *found)
        case, count = self._at_overflow()
        if not count:
            exact = self._exact
            return ScaleUse(exact is not None and not exact.scales)
        in_all = len(self._model.trainable_variables)
        numbers = {"variables": count, "variables_in_all": in_all}
        return ScaleUse(False, case, numbers)

    def _fitting(self):
        """Returns the results at the larger scale, lowered until finite."""
        while self._bits:
            other = self._at_other()
            if other and all(
                _fits(x, self.one.get(k)) for k, x in other.items()
            ):
                return other
            self._bits = int(self._bits / 2)
        return None

    def _differs(self):
        """Returns whether two scales differ more than two runs at one scale."""
        runs = [*map(self._again, _ORDER[:2])]
        off, spread = _off(*runs), {}
        for place in _ORDER[2:]:
            for key, error in _off(runs[place], self._again(place)).items():
                spread[key] = max(error, spread.get(key, 0.0))
        times = thresholds.SCALE_SPREADS
        return any(e > times * spread.get(k, 0.0) for k, e in off.items())


class _OneStep(_Comparison):
    """Compares the gradients that one step passes to the optimizers."""

    def _over_steps(self, off):
        # If held optimizers show no difference, random numbers caused the
        # difference between the runs.
        return None, {}

    @functools.cached_property
    def one(self):
        if self._exact is None:
            return self._again(0)
        return _unscaled(self._model, self._exact, 0)

    def _at_other(self):
        if self._exact is None:
            return self._again(1)
        # Record layer calls here too, as in the step at the first loss scale,
        # so that JAX reuses the compiled program.
        step = exact_step(self._model, self._data, 2.0**self._bits)
        return _unscaled(self._model, step, self._bits)

    def _again(self, place):
        bits = self._bits * place
        with in_float32(self._model):
            step = single_step(self._model, self._data, 2.0**bits)
        return _unscaled(self._model, step, bits)

    def _at_overflow(self):
        """Returns the fault at an infinite loss, and the count of variables."""
        with in_float32(self._model), overflowing():
            step = single_step(self._model, self._data, 1.0)
        moving = [k for k, g in self.one.items() if largest_magnitude(g)]
        found = [step.gradients[k] for k in moving if k in step.gradients]
        finite = [g for g in found if not nonfinite([to_array(g)])]
        # In the user's own step, some optimizers may not scale the loss, and
        # their gradients stay finite.
        some = len(finite) < len(found) and has_own_step(self._model)
        hidden = step.scales and not some
        return "hides_overflow", len(finite) * hidden


class _ManySteps(_Comparison):
    """Compares the changes that consecutive steps make."""

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
        # No weight changed, because the learning rate is 0 or JAX cannot trace
        # the step. So compare gradients.
        return _OneStep(*self._given).use()

    def _take(self, *how):
        with in_float32(self._model):
            return TakenSteps(self._model, self._data, *how)

    def _at_other(self):
        found = self._take(self._bits, self._first.count)
        # If steps were skipped because gradients overflow, the loss scale is
        # too large for a comparison.
        overflowed = any(count.any() for count in found.overflows.values())
        skipped = overflowed and found.updates != self._first.updates
        return None if skipped else found.changes

    def _again(self, place):
        # Gradients that the code keeps from earlier steps carry the current
        # loss scale, so apply each optimizer once before its loss scale
        # changes.
        bits = self._bits if place else None
        goes_on = any(self._first.updates.values())
        found = self._take(bits, self._count, goes_on)
        self._count = found.count
        return found.changes

    def _over_steps(self, off):
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
        """Returns the number of overflowing gradients that are not seen."""
        usual, given = self._first.given.get(key, []), found.given.get(key)
        # If `given` is `None`, the optimizer has applied no gradients.
        if given is None:
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
    """Runs two steps with held optimizers, and finds why gradients differ.

    Args:
        model: As for `scale_use`.
        data: As for `scale_use`.
        bits: As for `_Comparison`.
    """

    def __init__(self, model, data, bits):
        self._model, self._data, self._bits = model, data, bits
        self._exact = exact_step(model, data)
        other = exact_step(model, data, 2.0**bits)
        self.are_finite = is_finite(self._exact)
        self.first = _unscaled(self._model, self._exact, 0)
        self._second = _unscaled(self._model, other, bits)
        self.off = _off(self.first, self._second)
        self._calls = {call.name: call for call in other.calls}

    def cannot_be_rounding(self, off: dict) -> bool:
        """Returns whether float16 code cannot make these differences.

        Code of the user's own that computes in float16 rounds small gradients
        at one scale and not at the other.

        Args:
            off: Dict. The relative differences between the two scales.
        """
        off = self.off or off
        none = np.zeros(1)
        sizes = [largest_magnitude(self.first.get(key, none)) for key in off]
        if min(sizes) >= _NORMAL and min(off.values()) > _ROUNDED:
            return True
        one, other = [], []
        for bits, seen in ((0, one), (self._bits, other)):
            with (
                in_float32(self._model),
                step_held_at(self._model, self._data, 2.0**bits) as run,
            ):
                visit = functools.partial(_narrow, seen)
                active.replay().each_operation(run, [], visit)
        return len(one) == len(other) and all(map(np.array_equal, one, other))

    def fault(self):
        """Returns the case and the evidence."""
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
            case = "before_unscaling"
        return case, numbers

    def _behind(self):
        """Returns the last layer whose output gradient ignores the scale.

        Returns `MODEL_PATH` for the model's last layer, and `None` if all
        gradients follow the scale.
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
    # Some variables, such as float8 scales, take a new value in place of a
    # gradient. Leave such values out, because the loss scale does not affect
    # them.
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
    """Returns the errors of the arrays that differ, by key."""
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


def _narrow(seen, inputs, outputs):
    standard = keras.backend.standardize_dtype
    floats = filter(is_float, outputs)
    seen += [to_array(x) for x in floats if standard(x.dtype) == "float16"]


def _fits(array, exact):
    wide = exact is not None and np.isfinite(exact).all()
    return np.isfinite(array).all() or not wide


# The powers of two by which the loss scale differs from its initial value after
# each update. The scale moves up and then down, to expose code that averages
# scaled values.
_MOVES = (4, -5, 2)

# The number of steps to wait for a weight update: the usual number, and the
# maximum if no update has happened yet.
_USUAL, _MOST = 4, 8


class TakenSteps:
    """Takes consecutive steps on one batch, and undoes them.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        bits: Float. The initial loss scale, as a power of two. At infinity
            every loss overflows. `None` is a constant scale of 1.
        count: Int. The number of steps. Defaults to `None`: until weights have
            been updated twice, or up to a limit.
        goes_on: Boolean, whether to continue from earlier steps. Then each
            optimizer is first applied once at its current scale. Defaults to
            `False`.

    Attributes:
        count: Int. The number of steps taken.
        changes: Dict from a key to an array: the changes of weights and slots,
            and the last gradient norms that optimizers record. The key of a
            weight is its `id`.
        updates: Dict from the `id` of each optimizer that scales the loss to
            its number of updates.
        given: Dict from such an `id` to a list of booleans: whether each
            variable had a gradient in the last update.
        overflows: Dict from such an `id` to the overflows of each variable.
        rescaled: Set of the `id`s of optimizers whose scale the code set.
        raised: Boolean, whether the code has raised an exception.
    """

    def __init__(self, model, data, bits, count=None, goes_on=False):
        self._model, self._data, self._bits = model, data, bits
        self._taker = taker = StepTaker(model)
        first = {} if goes_on else taker.scaling
        self._scales = {key: self._scale() for key in first}
        # For each optimizer, the number of optimizers that update weights
        # before it in a step. The number selects the next loss scale, so
        # that all optimizers have different loss scales.
        self._turns: dict = {}
        self._turn = 0
        self.count = 0
        self.updates = dict.fromkeys(taker.scaling, 0)
        self.given: dict = {}
        self.rescaled: set = set()
        self.raised = False
        with taker.undone():
            self._take(count, int(goes_on))
        # The steps have been undone, so the variables hold their values from
        # before the steps.
        for variable in self._compared():
            self.changes[id(variable)] -= to_array(stored_value(variable))

    def _take(self, count, windows):
        overflows = self._taker.read("overflows")
        with self._noting():
            while not (self.raised or self._is_enough(count, windows)):
                try:
                    self._take_one()
                # User code may raise an error on infinite gradients.
                except Exception:
                    if self._bits != math.inf:
                        raise
                    self.raised = True
                self.count += 1
            self.changes = {
                id(v): to_array(stored_value(v)) + 0 for v in self._compared()
            } | self._taker.read("gradient_norms")
            self.overflows = {
                key: now - overflows[key]
                for key, now in self._taker.read("overflows").items()
            }

    def _is_enough(self, count, windows):
        if count is not None:
            return self.count >= count
        updates = max(self.updates.values())
        most = _USUAL if updates > windows else _MOST
        return updates >= windows + 2 or self.count >= most + windows * _USUAL

    def _take_one(self):
        before = self._updated()
        self._taker.set_scales(self._scales)
        with self._noting_scales():
            self._taker.take(self._data)
        self._turn = 0
        for key, now in self._updated().items():
            if now != before[key]:
                self.updates[key] += 1
                self._scales[key] = self._moved(key)

    def _moved(self, key):
        if isinstance(
            getattr(self._taker.scaling[key], "rule", None), FixedLossScale
        ):
            return self._scale()
        turn = self.updates[key] - 1 + self._turns.get(key, 0)
        return self._scale(_MOVES[turn % len(_MOVES)])

    def _scale(self, move=0):
        return 1.0 if self._bits is None else 2.0 ** (self._bits + move)

    def _noting_scales(self):
        """Returns a context that notes the optimizers whose scale is set."""
        with contextlib.ExitStack() as stack:
            for key, variable in self._taker.scale_variables().items():
                own = {"assign": self._noting_assign(key, variable.assign)}
                stack.enter_context(patched(variable, own))
            return stack.pop_all()

    def _noting_assign(self, key, assign):
        def noting(value):
            self.rescaled.add(key)
            return assign(value)

        return noting

    def _noting(self):
        """Returns a context that notes the gradients of each optimizer."""

        def apply(original, optimizer, grads, *args, **kwargs):
            if id(optimizer) in self._taker.scaling:
                return check(original, optimizer, grads, *args, **kwargs)
            self._turn += 1
            return original(optimizer, grads, *args, **kwargs)

        def check(original, optimizer, grads, *args, **kwargs):
            grads, key = list(grads), id(optimizer)
            self.given[key] = [gradient is not None for gradient in grads]
            self._turns[key] = self._turn
            return original(optimizer, grads, *args, **kwargs)

        methods = {"apply": apply, "_check_gradients": check}
        return instead_of_optimizers(methods)

    def _updated(self):
        return {
            key: int(to_array(micro_batches(with_wrapped(o)[-1]).value))
            for key, o in self._taker.scaling.items()
        }

    def _compared(self):
        scaling = self._taker.scaling
        others = [o for o in self._taker.optimizers if id(o) not in scaling]
        own = [v for optimizer in others for v in optimizer.variables]
        found = {id(v): v for v in [*self._model.trainable_variables, *own]}
        return found.values()
