"""Agrees with other processes, and runs without them, on TensorFlow."""

import contextlib
import functools

import tensorflow as tf
from tensorflow.python.debug.lib.check_numerics_callback import (
    CheckNumericsCallback as _NumericsCheck,
)
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

from keras_mixprec.backend.common import all_variables
from keras_mixprec.keras_internals import holding, stored_value


def workers(model):
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return 1
    return replicas // len(strategy.extended.worker_devices)


def rank(model):
    if workers(model) == 1:
        return 0
    resolver = model.distribute_strategy.cluster_resolver
    # A chief and the first worker both have task id 0, so number the workers
    # after the chief.
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", ()))
    return resolver.task_id + chiefs * (resolver.task_type == "worker")


def agree(model, values):
    rows = _all_rows(model.distribute_strategy)(tf.constant(values))
    return rows.numpy().max(axis=0)


@functools.cache
def _all_rows(strategy):
    """Returns a function that gathers the values of all replicas in rows."""

    def all_rows(values):
        # A strategy cannot take a maximum over its replicas. So each replica
        # fills its own row, and the strategy sums the rows.
        context = tf.distribute.get_replica_context()
        own = tf.one_hot(
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
            on_value=True,
            off_value=False,
        )
        rows = tf.where(own[:, None], values, tf.zeros_like(values))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, rows)

    # Without `tf.function`, the strategy would retrace `all_rows` in each call,
    # which takes 0.15 s.
    @tf.function(autograph=False)
    def run(values):
        rows = strategy.run(all_rows, args=(values,))
        return strategy.experimental_local_results(rows)[0]

    return run


@contextlib.contextmanager
def single_process(model):
    strategy = model.distribute_strategy
    mirrored = [
        variable
        for variable in all_variables(model)
        if isinstance(stored_value(variable), tf.distribute.DistributedValues)
    ]
    # Take each variable's value on this process. Reading a metric's variable
    # directly would sum the values of all workers.
    own = [
        strategy.experimental_local_results(stored_value(variable))[0]
        for variable in mirrored
    ]
    with holding(mirrored, own), _without_numerics_checks():
        yield


@contextlib.contextmanager
def _without_numerics_checks():
    """Context without `tf.debugging` checks, which raise on an infinity."""
    found = [
        callback
        for callback in context.context().op_callbacks
        if isinstance(getattr(callback, "__self__", None), _NumericsCheck)
    ]
    for callback in found:
        op_callbacks.remove_op_callback(callback)
    try:
        yield
    finally:
        for callback in found:
            op_callbacks.add_op_callback(callback)
