"""Measurements of a step on TensorFlow; see `interface.py`."""

import contextlib

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from keras_mixprec.backend import fused_ranges
from keras_mixprec.backend.interface import BIAS, EXPONENTS, SHIFT
from keras_mixprec.backend.tensorflow.gated_assign import under_xla

# Bits of exponent and mantissa.
_BITS = {tf.float16: (5, 10), tf.bfloat16: (8, 7)}


def measure(tensors, floors):
    if under_xla():
        return fused_ranges.measure(
            _rounded(tensors), floors, tf.bitcast, _reduce
        )
    tensors, sizes = _padded(tensors)
    magnitudes = tf.abs(tf.cast(tensors, tf.float32))
    largest = _maximum(magnitudes)
    # Squares of float32 numbers overflow and underflow, those of float16
    # numbers do not.
    wide = tf.float32 if tensors.dtype == tf.float16 else tf.float64

    def of_finite():
        squares = tf.square(tf.cast(magnitudes, wide))
        zeros = tf.zeros_like(largest)
        return largest, tf.reduce_sum(squares, 1), zeros, zeros

    def of_any():
        is_finite = tf.math.is_finite(magnitudes)
        finite = tf.where(is_finite, magnitudes, 0.0)
        squares = tf.square(tf.cast(finite, wide))
        nan, nonfinite = tf.math.is_nan(magnitudes), ~is_finite
        sums = tf.reduce_sum(squares, 1), _count(nan), _count(nonfinite)
        return _maximum(finite), *sums

    # It saves four of eight passes.
    is_finite = tf.reduce_all(tf.math.is_finite(largest))
    largest, squares, nan, nonfinite = tf.cond(is_finite, of_finite, of_any)
    means = squares / tf.cast(tf.maximum(sizes, 1.0), wide)
    rms = tf.cast(tf.sqrt(means), tf.float32)
    at_least = {
        floor: _count(magnitudes >= 2.0 ** (floor - BIAS)) + nan
        for floor in {*floors}
    }
    counts = [at_least[floor] for floor in floors]
    return tf.stack([largest, rms, nan, sizes, *counts, nonfinite], 1)


def _padded(tensors):
    """Rows of one length, with zeros behind them, and the length of each."""
    if not isinstance(tensors, tf.RaggedTensor):
        size = tf.cast(tf.shape(tensors)[1], tf.float32)
        return tensors, tf.fill([tensors.shape[0]], size)
    sizes = tensors.row_lengths()
    padded = tf.cond(
        tf.reduce_all(tf.equal(sizes, sizes[0])),
        lambda: tf.reshape(tensors.flat_values, [sizes.shape[0], -1]),
        tensors.to_tensor,
    )
    return padded, tf.cast(sizes, tf.float32)


def _maximum(magnitudes):
    # 0 of no elements; NaN, which `tf.maximum` hands on, stays.
    return tf.maximum(tf.reduce_max(magnitudes, 1), 0.0)


def _count(flags):
    return tf.reduce_sum(tf.cast(flags, tf.float32), 1)


def _rounded(tensors):
    if tensors.dtype not in _BITS:
        return tensors
    exponent, mantissa = _BITS[tensors.dtype]
    return gen_xla_ops.xla_reduce_precision(
        tensors, exponent_bits=exponent, mantissa_bits=mantissa
    )


def _reduce(tensors):
    scalars = [tf.TensorSpec([], tensor.dtype) for tensor in tensors]
    together = tf.function(_together, autograph=False)
    return gen_xla_ops.xla_variadic_reduce_v2(
        tensors,
        [tf.zeros([], tensor.dtype) for tensor in tensors],
        dimensions_to_reduce=[1],
        reducer=together.get_concrete_function(*scalars, *scalars),
    )


def _together(*numbers):
    half = len(numbers) // 2
    largest, *sums = zip(numbers[:half], numbers[half:], strict=True)
    return [tf.maximum(*largest), *(a + b for a, b in sums)]


def exponents(tensors):
    count = tensors.shape[0]
    if under_xla():
        tensors = _rounded(tensors)
    values = tf.bitcast(tf.abs(tf.cast(tensors, tf.float32)), tf.int32)
    values = tf.bitwise.right_shift(values, SHIFT)
    values = tf.reshape(values + tf.range(count)[:, None] * EXPONENTS, [-1])
    if under_xla():  # Which has no `Bincount`, two to three times as fast.
        counts = tf.math.unsorted_segment_sum(
            tf.ones_like(values), values, count * EXPONENTS
        )
    else:
        counts = tf.raw_ops.Bincount(
            arr=values,
            size=count * EXPONENTS,
            weights=tf.zeros([0], tf.int32),
        )
    return tf.reshape(counts, [count, EXPONENTS])


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
