"""Agrees with other processes, and runs without them, on JAX."""

import contextlib

import jax
import keras
from jax.experimental import multihost_utils

from keras_mixprec.backend.common import all_variables
from keras_mixprec.keras_internals import holding, stored_value


def workers(model):
    return jax.process_count()


def rank(model):
    return jax.process_index()


def agree(model, values):
    # Wait for all running programs before the processes communicate. On CPUs,
    # each process may run programs in a different order, and two programs that
    # communicate would deadlock.
    live = [x for x in jax.live_arrays() if not x.is_deleted()]
    jax.block_until_ready(live)
    return multihost_utils.process_allgather(values).max(axis=0)


@contextlib.contextmanager
def single_process(model):
    if jax.process_count() == 1:
        # A single process already runs the model alone, on all of its devices.
        yield
        return
    variables = all_variables(model)
    own = [_replica(stored_value(variable)) for variable in variables]
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        with holding(variables, own):
            yield
    finally:
        keras.distribution.set_distribution(distribution)


def _replica(array):
    if not array.is_fully_replicated:
        raise NotImplementedError(
            "its weights are spread over several processes"
        )
    return array.addressable_data(0)
