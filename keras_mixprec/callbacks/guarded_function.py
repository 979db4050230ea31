"""A train function during whose calls something is replaced."""

import functools
import weakref

import keras

from keras_mixprec.callbacks.next_call import without_taps
from keras_mixprec.callbacks.replacements import Replacements


class GuardedFunction:
    """The train function of a model, compiled with other methods in place.

    Args:
        model: A compiled `keras.Model`.
        in_steps: The `Replacements` that are in place during its calls.
        wrapped: Function from the model's `train_step` to what replaces it.
    """

    def __init__(self, model: keras.Model, in_steps: Replacements, wrapped):
        self._model = model
        self._in_steps = in_steps
        self._wrapped = wrapped
        self._guarded = None
        self._unguarded = lambda: None

    @property
    def fits(self) -> bool:
        """Whether the model still has the train function that was compiled.

        It has another one after `compile`, say.
        """
        own = without_taps(self._model.train_function)
        return own is not None and own in (self._unguarded(), self._guarded)

    @property
    def in_place(self) -> bool:
        """Whether it is what the model trains with."""
        return without_taps(self._model.train_function) is self._guarded

    def put(self):
        """Makes it the model's train function, compiled again if need be."""
        if self.fits:
            self._model.train_function = self._guarded
        else:
            self._compile()

    def _compile(self):
        model, in_steps = self._model, self._in_steps
        # Another function each time: for one that it knows JAX takes the trace
        # that it knows, of another loss, metric or optimizer.
        in_steps.add(model, "train_step", self._wrapped(model.train_step))
        with in_steps.in_place():
            model.make_train_function(force=True)
        train = model.train_function

        @functools.wraps(train)
        def guarded(*args):
            with in_steps.in_place():
                return train(*args)

        model.train_function = self._guarded = guarded

    def remove(self):
        """Gives the model a train function of its own.

        This one is kept for the next `put`.
        """
        if not self.fits:
            self._guarded = None
            return
        self._model.make_train_function(force=True)
        self._unguarded = weakref.ref(self._model.train_function)
