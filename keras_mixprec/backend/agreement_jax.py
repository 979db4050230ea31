"""Agreeing on JAX; see `agreement.py`."""

import jax
import keras
from jax.experimental import multihost_utils


def workers(model):
    return jax.process_count()


def is_chief(model):
    return jax.process_index() == 0


def agree(model, values):
    if jax.process_count() == 1:
        return values
    # On a CPU two programs run in any order, in every process another, and
    # wait for each other for ever if both talk to the other processes.
    jax.block_until_ready(_state(model))
    return multihost_utils.process_allgather(values).max(axis=0)


def _state(model):
    """What the last train step gave; the arrays before it are deleted."""
    state = getattr(model, "_jax_state", None)
    leaves = keras.tree.flatten((state, [v._value for v in model.variables]))
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
    ]
