"""Gradient accumulation of which an overflow discards the whole window."""

from keras import ops
from keras.src.saving.keras_saveable import KerasSaveable

from keras_mixprec.backend import step as backend_step


class AccumulationWindow(KerasSaveable):
    """Discards all micro-batches of a window in which one overflows.

    As torch, Apex, DeepSpeed, Megatron and Paddle do. The inner optimizer
    starts over, and the rest of the window is not given to it, so that windows
    begin where they would have begun.

    Args:
        inner: The inner optimizer.
    """

    def __init__(self, inner):
        self._inner = inner
        self._left = None
        self._unread = {}

    def build(self, add_variable):
        """Creates the variable: micro-batches that are still to be discarded.

        Args:
            add_variable: As for `StepHistory.build`.
        """
        self._left = add_variable("window_left", (), "int32")
        self.load_own_variables(self._unread)

    def admits(self, finite):
        """Returns whether the inner optimizer is given a micro-batch.

        Args:
            finite: Boolean, or a boolean scalar tensor.
        """
        step = backend_step.current()
        get = step.read if isinstance(finite, bool) else step.value
        steps = self._inner.gradient_accumulation_steps
        # What it is before this micro-batch, which may discard it.
        self._position = get(self._inner._iterations) % steps
        self._before = left = get(self._left)
        self._behind = steps - 1 - self._position
        if isinstance(finite, bool):
            return finite and not left
        return ops.logical_and(finite, ops.equal(left, 0))

    def discard(self, overflows):
        """Makes the inner optimizer start the window over.

        Args:
            overflows: Boolean, or a boolean scalar tensor. Whether the
                micro-batch does.
        """
        if isinstance(overflows, bool):
            if overflows:
                self._reset(lambda old, new: new)
            return
        self._reset(lambda old, new: ops.where(overflows, new, old))

    def advance(self, finite):
        """Counts a micro-batch.

        Args:
            finite: As for `admits`.
        """
        left, behind = self._before, self._behind
        if isinstance(finite, bool):
            following = left - 1 if left else (0 if finite else behind)
        else:
            following = ops.where(
                left > 0,
                left - 1,
                ops.where(finite, 0, ops.cast(behind, "int32")),
            )
        self._left.assign(following)

    def _reset(self, choose):
        for accumulated in self._inner._accumulated_gradients:
            if accumulated is not None:
                old = ops.convert_to_tensor(accumulated)
                accumulated.assign(choose(old, ops.zeros_like(old)))
        # A window that is being discarded has begun already: position 0.
        iterations = self._inner._iterations
        old = ops.convert_to_tensor(iterations)
        position = ops.cast(self._position, old.dtype)
        iterations.assign(choose(old, old - position))

    def save_own_variables(self, store):
        """Writes how much of a window is still to be discarded."""
        if self._left is not None:
            store["left"] = backend_step.current().read(self._left)

    def load_own_variables(self, store):
        """Reads it; other optimizers' files have it not."""
        if self._left is None:
            self._unread = {name: store[name] for name in list(store.keys())}
        elif "left" in store:
            self._left.assign(store["left"])

    def _obj_type(self):
        return "Optimizer"
