"""Measurements of a step on TensorFlow; see `probe.py`."""

import contextlib

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
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


def bincounts(values, length):
    count = values.shape[0]
    if count > 1:
        values += tf.range(count)[:, None] * length
    values = tf.reshape(values, [-1])
    if under_xla():  # Which has no `Bincount`, two to three times as fast.
        counts = tf.math.unsorted_segment_sum(
            tf.ones_like(values), values, count * length
        )
    else:
        counts = tf.raw_ops.Bincount(
            arr=values, size=count * length, weights=tf.zeros([0], tf.int32)
        )
    return tf.reshape(counts, [count, length])


def largest_and_rms(tensor):
    # Squares of float32 numbers overflow and underflow.
    squares = tf.square(tf.cast(tensor, tf.float64))
    rms = tf.cast(tf.sqrt(tf.reduce_mean(squares, 1)), tf.float32)
    return tf.reduce_max(tensor, 1), rms


def traced_once(function):
    return tf.function(function, autograph=False)


def without_gradient():
    return record.stop_recording()


def rows(gradient):
    return getattr(gradient, "values", gradient)


def twice(arguments):
    return arguments, arguments


def state_given(model, arguments):
    return contextlib.nullcontext()


def own_trace(arguments):
    return _graph()


def belongs(tensor, trace):
    return _graph() is trace


def may_wait(tensor, trace):
    # Of others nobody knows yet whether they are of one shape.
    return tensor.shape.is_fully_defined() and belongs(tensor, trace)


class Outlet:
    """Variables: nothing else leads out of a loop or past a strategy."""

    def __init__(self):
        self._variables = {}

    def carry(self, result, keys, rows):
        if rows is not None:
            self._assign(keys, rows)
        return result

    def put(self, key, row):
        self._assign((key,), row[None])

    def _assign(self, keys, rows):
        keys = (keys, _replica())
        if keys not in self._variables:
            with tf.init_scope():
                # Not `tf.Variable`, which a strategy would mirror.
                self._variables[keys] = resource_variable_ops.ResourceVariable(
                    tf.fill(rows.shape, float("nan")), trainable=False
                )
        self._variables[keys].assign(rows)

    def take(self, result):
        return result

    def read(self):
        found = {}
        for (keys, _), variable in self._variables.items():
            rows = variable.numpy()
            if np.isnan(rows[0, -1]):
                continue  # A branch, or the shape of a batch, not met.
            for key, row in zip(keys, rows, strict=True):
                found.setdefault(key, []).append(row)
            if len(self._variables) > 1:
                variable.assign(tf.fill(rows.shape, float("nan")))
        return [(key, np.stack(rows)) for key, rows in found.items()]


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _replica():
    context = tf.distribute.get_replica_context()
    number = getattr(context, "replica_id_in_sync_group", 0)
    number = tf.get_static_value(number)
    # On TPUs one program runs on all replicas, and cannot tell.
    return 0 if number is None else int(number)
