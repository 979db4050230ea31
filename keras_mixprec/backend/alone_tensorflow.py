"""Running alone on TensorFlow; see `alone.py`."""

import contextlib

import keras
import tensorflow as tf


@contextlib.contextmanager
def alone(model):
    strategy = model.distribute_strategy
    mirrored = [
        (variable, variable._value)
        for variable in _variables(model)
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


def _variables(model):
    optimizers = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]
    # Keras compares variables by value, so that no set holds them.
    found = [*model.variables, *model.metrics_variables]
    found += [v for optimizer in optimizers for v in optimizer.variables]
    return {id(variable): variable for variable in found}.values()
