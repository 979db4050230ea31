"""Running alone on TensorFlow; see `alone.py`."""

import contextlib

import tensorflow as tf

from keras_mixprec.backend.model_state import all_variables


@contextlib.contextmanager
def alone(model):
    strategy = model.distribute_strategy
    mirrored = [
        (variable, variable._value)
        for variable in all_variables(model)
        if isinstance(variable._value, tf.distribute.DistributedValues)
    ]
    # Reading a metric's would add up those of all workers.
    for variable, value in mirrored:
        variable._value = strategy.experimental_local_results(value)[0]
    try:
        yield
    finally:
        for variable, value in mirrored:
            variable._value = value
