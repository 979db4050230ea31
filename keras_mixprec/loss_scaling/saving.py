"""How the optimizer's state lies in a file: once, and as Keras reads it."""

import warnings

import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.loss_scaling.history import copy_store
from keras_mixprec.loss_scaling.rules import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    FixedLossScale,
)


class SavesOnce:
    """Mixin: saves and loads the state of wrapper and inner optimizer.

    Keras' wrapper stores the inner variables behind its own four, and then a
    second time under `inner_optimizer`. This one writes the first layout
    alone, which Keras' wrapper reads, and its history beside it. It reads
    that layout and the one of the bare inner optimizer.
    """

    _unread_state: dict | None = None  # Read before `build`.

    def save_own_variables(self, store):
        """Writes Keras' four variables and those of the inner optimizer."""
        if not self.built:
            # What it has read and waits for, if anything.
            for name, values in (self._unread_state or {}).items():
                store[name] = values
            return
        step = active.step()
        for index, variable in enumerate(self._saved_variables()):
            store[str(index)] = step.read(variable)

    def load_own_variables(self, store):
        """Reads a file of this optimizer, of Keras', or of the bare inner.

        An optimizer that is not built yet keeps what it reads until it is.
        A loss scale of 0 or infinity, which Keras' optimizer can save, is
        set to the first one with a warning.
        """
        if not self.built:
            self._unread_state = copy_store(store) or None
            return
        self._unread_state = None
        inner = self.inner_optimizer.variables
        for variables in (self._saved_variables(), inner):
            if _match(variables, store):
                for index, variable in enumerate(variables):
                    variable.assign(store[str(index)])
                self._check_scale()
                return
        warnings.warn(
            f"The state of optimizer {self.name!r} was not loaded: its "
            f"{len(self._saved_variables())} variables, or the {len(inner)} "
            f"of its inner optimizer, do not match the {len(store.keys())} "
            "in the file in number and shape. Compile with the optimizer, and "
            "the layers, that the file was saved with.",
            stacklevel=2,
        )

    def _saved_variables(self):
        own = [self._iterations, self._learning_rate]
        own += [self.step_counter, self._scale_variable]
        return own + self.inner_optimizer.variables

    def _check_scale(self):
        if isinstance(self.rule, FixedLossScale):
            # No update would ever bring it back from what a file held.
            self._scale_variable.assign(self.rule.scale)
        else:
            self._repair_scale()

    def _repair_scale(self):
        scale = float(active.step().read(self._scale_variable))
        # At 2**-126, the nearest one, all gradients would be 0 in float16.
        if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            usable = self._initial_scale()
            warnings.warn(
                f"Optimizer {self.name!r} has a loss scale of {scale:g}, which "
                "destroys weights or skips every step. Training continues with "
                f"the first one, {usable:g}.",
                stacklevel=4,
            )
            self._scale_variable.assign(usable)

    def __dir__(self):
        # Keras saves every attribute that `dir` lists; leaving this one out
        # is what keeps the inner state from being stored twice.
        return [n for n in super().__dir__() if n != "inner_optimizer"]


def _match(variables, store):
    return len(variables) == len(store.keys()) and all(
        tuple(variable.shape) == tuple(np.shape(store[str(index)]))
        for index, variable in enumerate(variables)
    )
