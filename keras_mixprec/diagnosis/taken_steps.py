"""Takes consecutive train steps at loss scales that move, and undoes them.

A loss scale moves only when its optimizer is applied. So a step may add up
scaled gradients until then, and no longer.
"""

import contextlib
import math

from keras_mixprec._patched import patched
from keras_mixprec.keras_internals import micro_batches, stored_value
from keras_mixprec.loss_scaling.rules import FixedLossScale
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.held_optimizer import with_wrapped
from keras_mixprec.numerics.held_optimizers import instead_of_optimizers
from keras_mixprec.numerics.taken_steps import StepTaker

# The powers of two by which a scale moves in turn from its start. First up and
# then down: an average of scaled norms lags behind both.
_MOVES = (4, -5, 2)

# How many steps may make one update, usually and at most.
_USUAL, _MOST = 4, 8


class TakenSteps:
    """The changes that consecutive steps of a model on one batch make.

    Nothing is changed afterwards.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        bits: Float. The loss scale to begin with, as a power of two; at
            infinity every loss overflows. `None` is a scale of 1 that does not
            move.
        count: Int. How many steps to take. Defaults to `None`: until weights
            have been updated twice, if they are soon.
        goes_on: Boolean, whether training goes on from steps before: each
            optimizer is applied once at the scale that it has. Defaults to
            `False`.

    Attributes:
        count: Int. How many steps were taken.
        changes: Dict from a key to an array: how weights and slots have
            changed, and the last norms of gradients that optimizers record.
            The key of a weight is its `id`.
        updates: Dict from the `id` of an optimizer that scales the loss to how
            often it has updated weights.
        given: Dict from such an `id` to whether there was a gradient for each
            variable when it was applied last.
        overflows: Dict from such an `id` to how often variables overflowed.
        rescaled: Set of such `id`s whose scale was set.
        raised: Boolean, whether the code has raised an exception.
    """

    def __init__(self, model, data, bits, count=None, goes_on=False):
        self._model, self._data, self._bits = model, data, bits
        self._taker = taker = StepTaker(model)
        first = {} if goes_on else taker.scaling
        self._scales = {key: self._scale() for key in first}
        # For each optimizer, how many others updated weights before it in the
        # step. Optimizers that are applied together have the same number.
        self._turns: dict = {}
        self._turn = 0
        self.count = 0
        self.updates = dict.fromkeys(taker.scaling, 0)
        self.given: dict = {}
        self.rescaled: set = set()
        self.raised = False
        with taker.undone():
            self._take(count, int(goes_on))
        # The step is undone, so this reads the values from before it.
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
        """Context that notes whose scale is set."""
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
        """Context that notes which optimizer is given what."""

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
