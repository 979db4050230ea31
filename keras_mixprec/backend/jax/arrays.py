"""Arrays on JAX: this process' part of one, and variables that hold others."""

import contextlib

import jax
import numpy as np


def own_rows(array):
    """Returns the rows that the devices of this process hold.

    Args:
        array: A `jax.Array` of which each device holds all or other rows;
            anything else is returned as it is.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return array
    rows = {
        shard.index[0].start or 0: shard.data
        for shard in array.addressable_shards
    }
    return jax.numpy.asarray(
        np.concatenate([np.asarray(rows[start]) for start in sorted(rows)])
    )


@contextlib.contextmanager
def holding(variables, values):
    """Context in which variables have other values.

    Args:
        variables: List of `keras.Variable`s.
        values: List of as many arrays. They are not copied.
    """
    before = [v._value for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._value = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value
