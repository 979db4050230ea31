"""Running alone on JAX; see `alone.py`."""

import contextlib

import jax
import keras

from keras_mixprec.backend.holding_jax import holding
from keras_mixprec.backend.model_state import all_variables


@contextlib.contextmanager
def alone(model):
    if jax.process_count() == 1:
        # Arrays are global: one process computes with all of its devices.
        yield
        return
    variables = all_variables(model)
    own = [_replica(variable._value) for variable in variables]
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
