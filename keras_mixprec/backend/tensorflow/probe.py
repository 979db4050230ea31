"""Measurements of a step on TensorFlow; see `interface.py`."""

import contextlib

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from keras_mixprec.backend.interface import BINS, INFINITY, SHIFT
from keras_mixprec.backend.tensorflow.gated_assign import under_xla

# Bits of exponent and mantissa.
_BITS = {tf.float16: (5, 10), tf.bfloat16: (8, 7)}


def measure(tensors):
    ragged = isinstance(tensors, tf.RaggedTensor)
    values = tensors.flat_values if ragged else tensors
    if values.dtype in _BITS and under_xla():
        exponent, mantissa = _BITS[values.dtype]
        values = gen_xla_ops.xla_reduce_precision(
            values, exponent_bits=exponent, mantissa_bits=mantissa
        )
    magnitudes = tf.abs(tf.cast(values, tf.float32))
    bits = tf.bitcast(magnitudes, tf.int32)
    finite = tf.where(bits < INFINITY, magnitudes, 0.0)
    # Squares of float32 numbers overflow and underflow, those of float16
    # numbers do not; sums in XLA are rounded after each element.
    narrow = values.dtype == tf.float16 and not under_xla()
    squares = tf.square(finite if narrow else tf.cast(finite, tf.float64))
    bins = tf.bitwise.right_shift(bits, SHIFT)
    if ragged:
        return _of_ragged(tensors, finite, squares, bins)
    rms = tf.cast(tf.sqrt(tf.reduce_mean(squares, 1)), tf.float32)
    count = values.shape[0]
    if count > 1:
        bins += tf.range(count)[:, None] * BINS
    return tf.reduce_max(finite, 1), rms, _bincounts(bins, count)


def _of_ragged(tensors, finite, squares, bins):
    count = tensors.row_lengths().shape[0]
    rows = tf.cast(tensors.value_rowids(), tf.int32)
    counts = _bincounts(bins + rows * BINS, count)
    # One row more, which is not empty: as many as there are come out.
    rows = tf.concat([rows, [count]], 0)
    largest = tf.math.segment_max(tf.pad(finite, [[0, 1]]), rows)[:count]
    sums = tf.math.segment_sum(tf.pad(squares, [[0, 1]]), rows)[:count]
    sizes = tf.cast(tf.maximum(tensors.row_lengths(), 1), sums.dtype)
    return largest, tf.cast(tf.sqrt(sums / sizes), tf.float32), counts


def _bincounts(values, count):
    values = tf.reshape(values, [-1])
    if under_xla():  # Which has no `Bincount`, two to three times as fast.
        counts = tf.math.unsorted_segment_sum(
            tf.ones_like(values), values, count * BINS
        )
    else:
        counts = tf.raw_ops.Bincount(
            arr=values, size=count * BINS, weights=tf.zeros([0], tf.int32)
        )
    return tf.reshape(counts, [count, BINS])


def ragged(tensors):
    sizes = tf.stack([tf.size(tensor, tf.int64) for tensor in tensors])
    values = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    return tf.RaggedTensor.from_row_lengths(values, sizes, validate=False)


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


def kept(tensor, trace):
    # XLA compiles each shape, and has no rows of different lengths.
    known = tensor.shape.is_fully_defined() or not under_xla()
    return tensor if known and belongs(tensor, trace) else None


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
        found = []
        for (keys, _), variable in self._variables.items():
            rows = variable.numpy()
            if np.isnan(rows[0, -1]):
                continue  # A branch, or the shape of a batch, not met.
            found += dict(zip(keys, rows[:, None], strict=True)).items()
            if len(self._variables) > 1:
                variable.assign(tf.fill(rows.shape, float("nan")))
        return found


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _replica():
    context = tf.distribute.get_replica_context()
    number = getattr(context, "replica_id_in_sync_group", 0)
    number = tf.get_static_value(number)
    # On TPUs one program runs on all replicas, and cannot know.
    return 0 if number is None else int(number)
