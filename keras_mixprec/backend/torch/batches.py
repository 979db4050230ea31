"""Looking into `fit` on torch; see `interface.py`."""

import contextlib


def tapped(model, train_function, look):
    def train(data):
        look(data[0])
        return train_function(data)

    return train


def synchronized(model, variables):
    return contextlib.nullcontext()
