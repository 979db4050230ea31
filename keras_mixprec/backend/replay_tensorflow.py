"""Running parts again on TensorFlow; `replay.py` says what each name does."""

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import op_callbacks


def is_concrete(tensor):
    return not tf.is_symbolic_tensor(tensor)


def observe(tensor, on_value, on_cotangent):
    on_value(tensor)
    # Not `tf.custom_gradient`: its IdentityN keeps the graph optimizer from
    # fusing operations, which then round differently. It prunes an Identity.
    with record.stop_recording():
        seen = tf.identity(tensor)

    def backward(cotangent):
        on_cotangent(cotangent)
        return [cotangent]

    record.record_operation_backprop_only(
        "Observed", [seen], [tensor], backward
    )
    return seen


def stop_gradient(tensor):
    return tf.stop_gradient(tensor)


def vjp(function, primals, pull):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(primals)
        outputs = function(primals)
    gradients = tape.gradient(
        outputs,
        primals,
        output_gradients=pull(outputs),
        unconnected_gradients="zero",
    )
    return outputs, [tf.convert_to_tensor(g) for g in gradients]


def compiled(function):
    def run(tensors):
        # Called directly, TensorFlow warns that one function after the other
        # is traced anew.
        traced = tf.function(function, jit_compile=True, autograph=False)
        return traced.get_concrete_function(tensors)(tensors)

    return run


def each_operation(function, tensors, look):
    # Symbolic inputs and outputs belong to functions, which run as a whole.
    def on_operation(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        nonlocal looking
        if graph is None and not looking:
            looking = True
            look(_numbers(inputs), _numbers(outputs))
            looking = False
        return outputs

    looking = False
    op_callbacks.add_op_callback(on_operation)
    try:
        function(tensors)
    finally:
        op_callbacks.remove_op_callback(on_operation)


def train_step(model, data):
    model.train_step(data)


def _numbers(tensors):
    return [t for t in tensors if t.dtype.is_floating]
