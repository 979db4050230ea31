"""Takes consecutive train steps at loss scales that move, and undoes them.

A loss scale moves only when its optimizer is applied. So a step may add up
scaled gradients until then, and no longer.
"""

import contextlib
import math

import keras
from keras import ops

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import all_variables
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import (
    holding,
    micro_batches,
    set_value,
    stored_value,
)
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.rules import FixedLossScale
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import restored
from keras_mixprec.numerics.held_optimizer import (
    is_scaling,
    scale_variables,
    with_wrapped,
)
from keras_mixprec.numerics.held_optimizers import instead_of_optimizers
from keras_mixprec.numerics.untouched import PythonState

# The powers of two by which a scale moves in turn from its start. First up and
# then down: an average of scaled norms lags behind both.
_MOVES = (4, -5, 2)

# How many steps may make one update, usually and at most.
_USUAL, _MOST = 4, 8

_WRAPPER = keras.optimizers.LossScaleOptimizer


def can_take_steps(model: keras.Model) -> bool:
    """Returns whether `TakenSteps` can take steps of a model.

    Optimizers that are not built yet would be in the step, and replicas would
    wait for each other. TensorFlow's know no variables that are widened.
    """
    found = _optimizers(model)
    narrow = any(v.dtype in SIXTEEN_BITS for v in model.trainable_variables)
    strategy = getattr(model, "distribute_strategy", None)
    return (
        all(o.built and (_is_wrapper(o) or not is_scaling(o)) for o in found)
        and not narrow
        and active.processes().workers(model) == 1
        and (strategy is None or strategy.num_replicas_in_sync == 1)
    )


def _optimizers(model):
    return PythonState(model).all_of(keras.optimizers.Optimizer)


def _is_wrapper(optimizer):
    return isinstance(optimizer, _WRAPPER)


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
        self._all = _optimizers(model)
        self._scaling = {id(o): o for o in self._all if _is_wrapper(o)}
        self._ours = {
            key: o
            for key, o in self._scaling.items()
            if isinstance(o, LossScaleOptimizer)
        }
        first = {} if goes_on else self._scaling
        self._scales = {key: self._scale() for key in first}
        self._traced: list = []
        # How many optimizers have updated weights in a step before one is given
        # its gradients: as many for those that are applied together.
        self._turns: dict = {}
        self._turn = 0
        self.count = 0
        self.updates = dict.fromkeys(self._scaling, 0)
        self.given: dict = {}
        self.rescaled: set = set()
        self.raised = False
        with restored(model), active.undo().telling(lambda _: None):
            self._take(count, int(goes_on))
        for variable in self._compared():  # By now it is as it was.
            self.changes[id(variable)] -= to_array(stored_value(variable))

    def _take(self, count, windows):
        known = all_variables(self._model)
        overflows = self._read("overflows")
        with (
            holding(known, [stored_value(v) for v in known]),
            self._noting(),
            self._dividing(),
        ):
            state = PythonState(self._model)
            while not (self.raised or self._is_enough(count, windows)):
                try:
                    self._take_one()
                except Exception:  # Code may refuse what is infinite.
                    if self._bits != math.inf:
                        raise
                    self.raised = True
                self.count += 1
                if not _is_eager(self._model):
                    state.put_back()  # Python code runs as it is traced.
            self.changes = {
                id(v): to_array(stored_value(v)) + 0 for v in self._compared()
            } | self._read("gradient_norms")
            self.overflows = {
                key: now - overflows[key]
                for key, now in self._read("overflows").items()
            }

    def _is_enough(self, count, windows):
        if count is not None:
            return self.count >= count
        updates = max(self.updates.values())
        most = _USUAL if updates > windows else _MOST
        return updates >= windows + 2 or self.count >= most + windows * _USUAL

    def _take_one(self):
        before, written, replay = self._updated(), [], active.replay()

        def run(data):
            written[:] = replay.take_step(self._model, data, self._traced)
            return [value for _, value in written]

        with self._at_scales():
            values = replay.run_once(self._model, run, self._data)
        for (variable, _), value in zip(written, values, strict=True):
            if value is not None:
                set_value(variable, value)
        self._turn = 0
        for key, now in self._updated().items():
            if now != before[key]:
                self.updates[key] += 1
                self._scales[key] = self._moved(key)

    def _moved(self, key):
        if isinstance(
            getattr(self._scaling[key], "rule", None), FixedLossScale
        ):
            return self._scale()
        turn = self.updates[key] - 1 + self._turns.get(key, 0)
        return self._scale(_MOVES[turn % len(_MOVES)])

    def _scale(self, move=0):
        return 1.0 if self._bits is None else 2.0 ** (self._bits + move)

    @contextlib.contextmanager
    def _at_scales(self):
        variables = {k: scale_variables(o)[0] for k, o in self._scaling.items()}
        for key, scale in self._scales.items():
            scale = ops.convert_to_tensor(scale, "float32")
            set_value(variables[key], scale)
        # A compiled step keeps what it reads besides its state.
        values = [(v, stored_value(v)) for v in variables.values()]
        self._traced = self._traced or values
        with contextlib.ExitStack() as stack:
            for key, variable in variables.items():
                own = {"assign": self._noting_assign(key, variable.assign)}
                stack.enter_context(patched(variable, own))
            yield

    @contextlib.contextmanager
    def _dividing(self):
        """Context in which optimizers take the loss for scaled."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._ours.values():
                own = {"scaling": True}
                stack.enter_context(patched(optimizer._stages, own))
            yield

    def _noting_assign(self, key, assign):
        def noting(value):
            self.rescaled.add(key)
            return assign(value)

        return noting

    def _noting(self):
        """Context that notes which optimizer is given what."""

        def apply(original, optimizer, grads, *args, **kwargs):
            if id(optimizer) in self._scaling:
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
            for key, o in self._scaling.items()
        }

    def _read(self, name):
        return {
            (key, name): to_array(getattr(o.history, name).value) + 0
            for key, o in self._ours.items()
        }

    def _compared(self):
        others = [o for o in self._all if not _is_wrapper(o)]
        own = [v for optimizer in others for v in optimizer.variables]
        found = {id(v): v for v in [*self._model.trainable_variables, *own]}
        return found.values()


def _is_eager(model):
    return model.run_eagerly or "eager" in active.runtime().MODES
