"""Measurements of a step on TensorFlow; see `probe.py`."""

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops import resource_variable_ops

from keras_mixprec.backend.xla_context import under_xla

# Bits of exponent and mantissa.
_BITS = {tf.float16: (5, 10), tf.bfloat16: (8, 7)}


def as_held(tensor):
    if tensor.dtype not in _BITS or not under_xla():
        return tensor
    exponent, mantissa = _BITS[tensor.dtype]
    return gen_xla_ops.xla_reduce_precision(
        tensor, exponent_bits=exponent, mantissa_bits=mantissa
    )


def bits(tensor):
    return tf.bitcast(tensor, tf.int32)


def bincount(values, length):
    # Not `tf.math.bincount`, which XLA has not.
    return tf.math.unsorted_segment_sum(tf.ones_like(values), values, length)


def traced_once(function):
    return tf.function(function, autograph=False)


def rows(gradient):
    return getattr(gradient, "values", gradient)


def twice(arguments):
    return arguments, arguments


class Slots:
    """Variables: nothing else leads out of a loop or a backward pass."""

    def __init__(self):
        self._variables = {}

    def put(self, key, vector):
        key = (key, _replica())
        if key not in self._variables:
            with tf.init_scope():
                # Not `tf.Variable`, which a strategy would mirror.
                self._variables[key] = resource_variable_ops.ResourceVariable(
                    tf.fill(vector.shape, float("nan")), trainable=False
                )
        self._variables[key].assign(vector)

    def read(self):
        found = {}
        for (key, _), variable in self._variables.items():
            vector = variable.numpy()
            if not np.isnan(vector[-1]):  # A branch that was not taken.
                found.setdefault(key, []).append(vector)
        return found


def _replica():
    context = tf.distribute.get_replica_context()
    number = getattr(context, "replica_id_in_sync_group", 0)
    number = tf.get_static_value(number)
    # On TPUs one program runs on all replicas, and cannot tell.
    return 0 if number is None else int(number)
