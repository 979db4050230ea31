"""Holding on to the next batch of a model."""

from collections.abc import Callable

from keras_mixprec.backend import batches as backend_batches
from keras_mixprec.callbacks.next_call import NextCall


class HeldBatch:
    """Holds the batch of one step until it is asked for. Nothing is copied."""

    def __init__(self):
        self._held = None
        self._next_call = NextCall()

    def hold(self, model, describe: Callable = lambda: None):
        """Holds the next batch that `model` trains on.

        Args:
            model: The `keras.Model`.
            describe: Function, called before the step is taken. Defaults to
                one that returns `None`.

        Raises:
            NotImplementedError: If batches cannot be held.
        """
        if getattr(model, "steps_per_execution", 1) > 1:
            raise NotImplementedError("several steps in one execution")

        def look(batch):
            self._next_call.disarm()
            self._held = None if batch is None else (batch, describe())

        tapped = backend_batches.current().tapped(
            model, lambda *args: model.train_function(*args), look
        )
        self._next_call.arm(model, tapped)

    def take(self) -> tuple | None:
        """Returns the batch and what `describe` returned, once."""
        held, self._held = self._held, None
        return held

    def end_epoch(self):
        """Waits no more for a batch: there was none left to hold."""
        self._next_call.disarm()

    def disarm(self):
        """Holds no batch after all."""
        self._next_call.disarm()
        self._held = None
