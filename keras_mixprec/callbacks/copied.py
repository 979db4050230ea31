"""Callbacks that are copied and sent to other processes."""

import keras


class CopiedCallback(keras.callbacks.Callback):
    """A callback that is copied without the model and the `fit` it is in.

    What it was given and what a `fit` has left as its result is copied.
    """

    _OF_ONE_FIT = ("_model", "_engine", "_tuning")

    def __getstate__(self):
        state = dict(vars(self))
        return state | {n: None for n in self._OF_ONE_FIT if n in state}
