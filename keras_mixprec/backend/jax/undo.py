"""Undoes nothing, because on JAX steps write only Keras variables."""

import contextlib


def undone(model, generators):
    return contextlib.nullcontext()


def telling(stepped):
    return contextlib.nullcontext()
