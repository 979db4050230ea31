"""Callbacks that keep the best value of a metric, and epochs without one."""

import gc
import math

import keras

_KINDS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


def forget_nan_as_best(model):
    """Lets callbacks that took NaN for the best value take the next one.

    Keras compares with NaN, which nothing is better than, for ever: training
    would be stopped, or no other checkpoint written, because of a first epoch
    in which every step was skipped. Values of the validation are left alone.

    Args:
        model: The `keras.Model` that the callbacks belong to.
    """
    # Callbacks do not know each other. It takes 50 ms among a million objects,
    # after epochs without a finite loss only.
    for callback in gc.get_objects():
        if (
            issubclass(type(callback), _KINDS)
            and callback._model is model
            and not callback.monitor.startswith("val_")
            and _is_nan(callback.best)
        ):
            callback.best = None


def _is_nan(value):
    return value is not None and math.isnan(value)
