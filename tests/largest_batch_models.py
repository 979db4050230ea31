"""Models and data that a trial's process imports."""

import os
import signal
import time

import keras
import numpy as np

# Samples that fit, of models that are short of memory beyond that.
KNOWN = 700


class Hungry(keras.Sequential):
    """Runs out of memory in a batch that is too large."""

    def train_on_batch(self, x, *arguments, **options):
        if len(x) > KNOWN:
            # More than there is.
            keras.ops.convert_to_numpy(keras.ops.zeros((2**50,)))
        return super().train_on_batch(x, *arguments, **options)


def hungry():
    model = Hungry([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def batch():
    return np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def linear():
    return hungry()


def zeros():
    return tuple(0 * array for array in batch())


def broken():
    raise KeyError("what is wrong")


def crashed():
    os.kill(os.getpid(), signal.SIGSEGV)


def endless():
    time.sleep(60)
