"""JAX writes only variables of Keras; see `interface.py`."""

import contextlib


def undone(model, generators):
    return contextlib.nullcontext()


def telling(stepped):
    return contextlib.nullcontext()
