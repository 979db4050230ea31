"""An optimizer step that may be skipped, on TensorFlow; see `interface.py`.

There are three ways to skip an update. Each is the fastest in its case:

- Under XLA, each assignment selects the new or the old value
  (`gated_assign.py`).
- Without XLA, a `tf.cond` runs the update or skips it.
- Strategies that aggregate through `merge_call` need the `tf.cond` outside of
  the replica context.
"""

import math

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from keras_mixprec.backend.grouped_norms import (
    grouped_kinds,
    grouped_map,
    grouped_norms,
)
from keras_mixprec.backend.tensorflow.gated_assign import (
    gated_update,
    under_xla,
)
from keras_mixprec.keras_internals import updated_variables

# The average number of elements per variable above which a lowered `tf.cond` is
# faster. Lowering saves 2% of a step of six Dense(1024) layers, but costs 1%
# with variables of 256 x 256 elements.
_LARGE = 2**17


def gradient_norms(gradients):
    rows = [_rows(g) for g in gradients]
    if under_xla() and _on_cpu():
        return grouped_norms(rows, _wide_sums_of_squares)
    return grouped_norms(rows, _sums_of_squares, tf.cond)


def gradient_maxima(gradients):
    return tf.stack([_maximum(g) for g in gradients])


def nonfinite_kinds(gradients, skipped):
    rows = [_rows(g) for g in gradients]
    if skipped is True:
        return grouped_kinds(rows)
    return choose(
        skipped,
        lambda: grouped_kinds(rows),
        lambda: tf.zeros((len(rows), 3)),
    )


def is_sparse(gradient):
    return isinstance(gradient, tf.IndexedSlices)


def replica():
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    # On TPUs, all replicas are one program, so a replica's id is not a
    # constant.
    own = tf.get_static_value(context.replica_id_in_sync_group)
    return None if own is None else int(own)


def trace(tensors):
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "building_function", False):
        if not getattr(graph.outer_graph, "building_function", False):
            break
        graph = graph.outer_graph
    return graph


def are_of_one_trace(one, other):
    return getattr(one, "graph", None) is getattr(other, "graph", None)


def sum_over_replicas(tensor):
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "`apply` must be called in a replica context: inside a function "
            "that is passed to `strategy.run`."
        )
    if context.num_replicas_in_sync == 1:
        return tensor
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def to_host_bool(finite):
    return bool(finite) if tf.executing_eagerly() else finite


def choose(condition, if_true, if_false):
    # For branches without side effects, a `tf.cond` that stays one operation is
    # cheaper.
    if under_xla():
        return tf.cond(condition, if_true, if_false)
    return _cond(condition, if_true, if_false, lowered=False)


def unscale(gradients, inverse, keep, variables=()):
    def scale(tensor):
        wide = tensor.dtype == tf.float64
        tensor = tensor if wide else tf.cast(tensor, tf.float32)
        return tensor * tf.cast(inverse, tensor.dtype)

    chosen = [
        i for i, g in enumerate(gradients) if g is not None and not keep[i]
    ]
    rows = [_rows(gradients[i]) for i in chosen]
    # Under XLA, each product of a gradient and the inverse scale fuses with the
    # update that reads the product. Grouping gradients would not help.
    scaled = map(scale, rows) if under_xla() else grouped_map(scale, rows)
    result = list(gradients)
    for index, values in zip(chosen, scaled, strict=True):
        result[index] = _with_rows(gradients[index], values)
    return result


def commit(optimizer, finite, unscaled, variables, record, remember):
    inner = optimizer.inner_optimizer

    def update(gradients=None):
        inner.apply(unscaled() if gradients is None else gradients, variables)

    if under_xla():
        gated_update(
            finite,
            inner,
            update,
            [*updated_variables(inner), *inner.variables],
        )
        remember(tf.logical_not(finite))
    elif _merges():
        _update_across_replicas(finite, unscaled(), update)
        remember(tf.logical_not(finite))
    else:
        branches = _effect(update), _effect(lambda: remember(True))
        _cond(finite, *branches, lowered=_are_large(variables))
    record()


def outside_graph():
    return tf.init_scope()


def read(variable):
    return value(variable).numpy()


def read_sum(variable):
    # Read the replicas of this process one by one, because reading the variable
    # itself would wait for all workers.
    replicas = getattr(variable.value, "values", [variable.value])
    return sum(replica.numpy() for replica in replicas)


def value(variable):
    variable = variable.value
    local = tf.distribute.get_strategy().experimental_local_results(variable)
    return tf.convert_to_tensor(local[0])


def _maximum(gradient):
    magnitudes = tf.abs(tf.cast(_rows(gradient), tf.float32))
    if is_sparse(gradient):
        # Sum the magnitudes of all rows, as if all rows had the same index. The
        # sum is an upper bound for the true maximum.
        magnitudes = tf.reduce_sum(magnitudes, axis=0)
    return tf.reduce_max(magnitudes)


def _rows(gradient):
    # Keep rows of a sparse gradient separate even if they have the same index,
    # so that each row is checked.
    return gradient.values if is_sparse(gradient) else gradient


def _with_rows(gradient, rows):
    if not is_sparse(gradient):
        return rows
    return tf.IndexedSlices(rows, gradient.indices, gradient.dense_shape)


def _sums_of_squares(tensor, axes):
    if len(axes) == tensor.shape.rank:
        return 2.0 * tf.nn.l2_loss(tensor)
    return tf.reduce_sum(tf.square(tensor), axis=axes)


def _wide_sums_of_squares(tensor, axes):
    # Squares of float32 numbers cannot overflow in float64. In float32, a
    # `tf.cond` that handles overflow would take 5% of a step of six Dense(1024)
    # layers. XLA must not reorder floating-point sums, so XLA adds 2**20
    # numbers one by one, in 1.2 ms. Adding the two halves of a tensor
    # elementwise vectorizes, and takes 0.3 ms. Halve the longest even axis
    # first, so that the order of the axes does not matter.
    squares = tf.square(tf.cast(tensor, tf.float64))
    while axes and squares.shape.is_fully_defined():
        lengths = {axis: squares.shape[axis] for axis in axes}
        axis = max(
            (axis for axis in axes if lengths[axis] % 2 == 0),
            key=lengths.get,
            default=None,
        )
        if axis is None or math.prod(lengths.values()) <= 2048:
            break
        squares = tf.add_n(tf.split(squares, 2, axis))
    return tf.reduce_sum(squares, axis=axes)


def _merges():
    return (
        tf.distribute.has_strategy()
        and not tf.__internal__.distribute.strategy_supports_no_merge_call()
    )


def _update_across_replicas(finite, gradients, update):
    def decide(strategy, finite, gradients):
        # Take `finite` from the first replica. The flag is equal on all
        # replicas, because it was computed from sums over the replicas.
        finite = strategy.experimental_local_results(finite)[0]

        def update_all():
            strategy.extended.call_for_each_replica(update, args=(gradients,))

        tf.cond(finite, _effect(update_all), _effect(lambda: None))

    tf.distribute.get_replica_context().merge_call(
        decide, args=(finite, gradients)
    )


def _effect(function):
    def run():
        function()
        return tf.constant(True)

    return run


def _are_large(variables):
    elements = sum(math.prod(variable.shape) for variable in variables)
    return elements > _LARGE * len(variables)


def _cond(condition, if_true, if_false, lowered):
    """Runs a `tf.cond` that stays one operation on a CPU unless `lowered`.

    TensorFlow lowers a cond to one Switch for each tensor that its branches
    read. The Adam update of 200 variables reads about 1,000 tensors, and the
    Switches take 30% of the step. A cond that stays one operation calls its
    branch as a function. The call takes 15% of the step, but cannot reuse the
    memory of the gradients.
    """
    if lowered or tf.executing_eagerly() or not _on_cpu():
        return tf.cond(condition, if_true, if_false)
    graph = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    result = tf.cond(condition, if_true, if_false)
    for operation in graph.get_operations()[start:]:
        if operation.type in ("If", "StatelessIf"):
            operation._set_attr(
                "_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False)
            )
    return result


def _on_cpu():
    return all(d.device_type == "CPU" for d in tf.config.list_logical_devices())
