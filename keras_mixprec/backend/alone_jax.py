"""Running alone on JAX; see `alone.py`."""

import contextlib

import jax
import keras

from keras_mixprec.backend.model_state import all_variables


@contextlib.contextmanager
def alone(model):
    if jax.process_count() == 1:
        # Arrays are global: one process computes with all of its devices.
        yield
        return
    variables = all_variables(model)
    before = [variable._value for variable in variables]
    own = [_replica(value) for value in before]
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    _assign(variables, own)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)
        _assign(variables, before)


def _replica(array):
    if not array.is_fully_replicated:
        raise NotImplementedError(
            "its weights are spread over several processes"
        )
    return array.addressable_data(0)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable._value = value
