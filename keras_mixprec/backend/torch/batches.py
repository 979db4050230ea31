"""The batches of `fit` on torch; see `interface.py`."""

import contextlib


def tapped(model, train_function, visit, raised=None):
    def train(data):
        visit(data[0])
        return train_function(data)

    return train


def synchronized(model, variables):
    return contextlib.nullcontext()
