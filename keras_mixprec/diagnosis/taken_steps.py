"""Takes consecutive train steps at loss scales that move, and undoes them.

A loss scale moves only when its optimizer is applied. So a step may add up
scaled gradients until then, and no longer.
"""

import contextlib
import math
import warnings
from typing import NamedTuple

import keras
from keras import ops

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import all_variables
from keras_mixprec.keras_internals import (
    holding,
    micro_batches,
    set_value,
    stored_value,
)
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.rules import FixedLossScale
from keras_mixprec.numerics.arrays import largest_magnitude, to_array
from keras_mixprec.numerics.dry_step import restored
from keras_mixprec.numerics.held_optimizer import (
    is_scaling,
    scale_variables,
    with_wrapped,
)
from keras_mixprec.numerics.held_optimizers import instead_of_optimizers
from keras_mixprec.numerics.untouched import PythonState

# By what powers of two a scale moves in turn from where it starts. First up and
# then down: an average of scaled norms lags behind both.
_MOVES = (4, -5, 2)

# How many steps may make one update, usually and at most.
_USUAL, _MOST = 4, 8

# What a weight is rounded by, as a share of the largest.
_ROUNDING = 2.0**-21


class TakenSteps(NamedTuple):
    """What consecutive steps have done.

    Attributes:
        changes: Dict from a key to an array: how weights and slots have
            changed, and the last norms of gradients that optimizers record.
            The key of a weight is its `id`.
        roundings: Dict from such keys to the largest difference that is
            rounding.
        steps: Int. How many were taken.
        window: Int. How many the first update took, 0 if there was none.
        updates: Dict from the `id` of an optimizer that scales the loss to how
            often it has updated weights.
        given: Dict from such an `id` to whether there was a gradient for each
            variable when it was applied last.
        overflows: Dict from such an `id` to which variables overflowed.
        rescaled: Set of the `id`s of optimizers whose scale was set.
        undivided: Boolean. Whether an optimizer has found that nothing
            multiplies the loss by its scale.
        raised: Boolean. Whether the code has raised an exception.
    """

    changes: dict
    roundings: dict
    steps: int
    window: int
    updates: dict
    given: dict
    overflows: dict
    rescaled: set
    undivided: bool
    raised: bool


def take_steps(
    model: keras.Model,
    data,
    bits: float | None,
    count: int | None = None,
    *,
    goes_on: bool = False,
) -> TakenSteps:
    """Lets a model train for some steps on one batch, and undoes it.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        bits: Float. The largest of the loss scales that the steps move through,
            as a power of two; at infinity every loss overflows. `None` is a
            scale of 1 that does not move.
        count: Int. How many steps. Defaults to `None`: until weights have been
            updated twice, if they are soon.
        goes_on: Boolean. Whether training goes on from steps before: each
            optimizer updates weights once at the scale that it has. Defaults
            to `False`.
    """
    with restored(model), active.undo().telling(lambda _: None):
        run = _Run(model, data, bits, goes_on)
        taken = run.take(count)
    # By now they have the values of before.
    for variable in run.variables():
        taken.changes[id(variable)] -= to_array(stored_value(variable))
    return taken


def can_take_steps(model: keras.Model) -> bool:
    """Whether all optimizers of a model are built; others would be in it."""
    return all(optimizer.built for optimizer in _optimizers(model))


def _optimizers(model):
    return PythonState(model).all_of(keras.optimizers.Optimizer)


class _Run:
    def __init__(self, model, data, bits, goes_on):
        self._model, self._data, self._bits = model, data, bits
        self._goes_on = goes_on
        self._all = _optimizers(model)
        inner = {id(x) for o in self._all for x in with_wrapped(o)[1:]}
        found = [o for o in self._all if is_scaling(o) and id(o) not in inner]
        self._scaling = {id(o): o for o in found}
        self._scales: dict = {}
        if not goes_on:
            self._scales = dict.fromkeys(self._scaling, self._scale())
        self._updates = dict.fromkeys(self._scaling, 0)
        self._traced: list = []
        self._given: dict = {}
        self._rescaled: set = set()
        # How many optimizers have updated weights in a step before one is given
        # its gradients: as many for those that are applied together.
        self._before: dict = {}
        self._updating = 0

    def take(self, count):
        flags = self._flags()
        state = PythonState(self._model)
        known = all_variables(self._model)
        taken, window, raised, undivided = 0, 0, False, False
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                holding(known, [stored_value(v) for v in known])
            )
            stack.enter_context(self._noting())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # Training will give them.
            while not (raised or self._is_enough(taken, count)):
                try:
                    self._take_one()
                except Exception:  # Code may refuse what is infinite.
                    if self._bits != math.inf:
                        raise
                    raised = True
                taken += 1
                window = window or taken * any(self._updates.values())
                undivided |= any(
                    o.loss_not_scaled for o in self._ours().values()
                )
                if not _is_eager(self._model):
                    state.put_back()  # Python code runs as it is traced.
            values = {
                id(v): to_array(stored_value(v)) + 0 for v in self.variables()
            }
            overflows = {k: f > flags[k] for k, f in self._flags().items()}
            norms = {
                (key, "norms"): to_array(o.history.gradient_norms.value) + 0
                for key, o in self._ours().items()
            }
        return TakenSteps(
            values | norms,
            {k: _ROUNDING * largest_magnitude(x) for k, x in values.items()},
            taken,
            window,
            self._updates,
            self._given,
            overflows,
            self._rescaled,
            undivided,
            raised,
        )

    def _is_enough(self, taken, count):
        if count is not None:
            return taken >= count
        windows = max(self._updates.values()) - self._goes_on
        most = _USUAL if windows > 0 else _MOST
        return windows >= 2 or taken >= most + _USUAL * self._goes_on

    def _take_one(self):
        run_once = active.replay().run_once
        updates = self._counts()
        written: list = []

        def run(data):
            nonlocal written
            written = active.replay().take_step(self._model, data, traced)
            return [value for _, value in written]

        with self._at_scales() as scales:
            # A compiled step keeps what it reads besides its state.
            traced = self._traced = self._traced or scales
            values = run_once(self._model, run, self._data)
        for (variable, _), value in zip(written, values, strict=True):
            if value is not None:
                set_value(variable, value)
        self._updating = 0
        for key, now in self._counts().items():
            if now != updates[key]:
                self._updates[key] += 1
                self._scales[key] = self._moved(key)

    def _moved(self, key):
        rule = getattr(self._scaling[key], "rule", None)
        if isinstance(rule, FixedLossScale):
            return self._scale()
        turn = self._updates[key] - 1 + self._before.get(key, 0)
        return self._scale(_MOVES[turn % len(_MOVES)])

    def _scale(self, move=0):
        return 1.0 if self._bits is None else 2.0 ** (self._bits + move)

    @contextlib.contextmanager
    def _at_scales(self):
        """Context of a step, with the variables of scales and their values."""
        found = []
        with contextlib.ExitStack() as stack:
            for key, scale in self._scales.items():
                optimizer = self._scaling[key]
                if optimizer.loss_scale_factor is not None:
                    own = {"loss_scale_factor": scale}
                    stack.enter_context(patched(optimizer, own))
                for variable in scale_variables(optimizer):
                    set_value(variable, ops.convert_to_tensor(scale, "float32"))
            for key, optimizer in self._scaling.items():
                for variable in scale_variables(optimizer):
                    found.append((variable, stored_value(variable)))
                    own = {"assign": self._noting_assign(key, variable)}
                    stack.enter_context(patched(variable, own))
            yield found

    def _noting_assign(self, key, variable):
        assign = variable.assign

        def noting(value):
            self._rescaled.add(key)
            return assign(value)

        return noting

    def _noting(self):
        """Context that notes which optimizer is given what."""

        def apply(original, optimizer, grads, *args, **kwargs):
            if id(optimizer) in self._scaling:
                return check(original, optimizer, grads, *args, **kwargs)
            self._updating += 1
            return original(optimizer, grads, *args, **kwargs)

        def check(original, optimizer, grads, *args, **kwargs):
            grads, key = list(grads), id(optimizer)
            self._given[key] = [gradient is not None for gradient in grads]
            self._before[key] = self._updating
            return original(optimizer, grads, *args, **kwargs)

        methods = {"apply": apply, "_check_gradients": check}
        return instead_of_optimizers(methods)

    def _counts(self):
        return {
            key: int(to_array(micro_batches(with_wrapped(o)[-1]).value))
            for key, o in self._scaling.items()
        }

    def _ours(self):
        return {
            key: o
            for key, o in self._scaling.items()
            if isinstance(o, LossScaleOptimizer)
        }

    def _flags(self):
        return {
            key: to_array(o.history.overflows.value) + 0
            for key, o in self._ours().items()
        }

    def variables(self):
        """Returns the variables that are compared: weights and slots."""
        wrapper = keras.optimizers.LossScaleOptimizer
        others = [o for o in self._all if not isinstance(o, wrapper)]
        own = [v for optimizer in others for v in optimizer.variables]
        found = {id(v): v for v in [*self._model.trainable_variables, *own]}
        return [*found.values()]


def _is_eager(model):
    return model.run_eagerly or "eager" in active.runtime().MODES
