"""Runs parts of a model again on TensorFlow, eagerly; see `interface.py`."""

import contextlib
import contextvars
import functools
import warnings

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import op_callbacks

from keras_mixprec.backend.user_code import line_of, stack
from keras_mixprec.keras_internals import stored_value

# The type of the operation that is being visited.
_VISITED = contextvars.ContextVar("visited")

REFUSALS = (tf.errors.OpError, TypeError, ValueError, NotImplementedError)


def is_concrete(tensor):
    return not tf.is_symbolic_tensor(tensor)


def observe(tensor, on_value, on_cotangent):
    # Convert `tensor`, which may be a variable that a layer passes to another
    # layer.
    tensor = tf.convert_to_tensor(tensor)
    on_value(tensor)
    # Do not use `tf.custom_gradient`, which adds an IdentityN operation. An
    # IdentityN keeps the graph optimizer from fusing operations, so rounding
    # changes. The graph optimizer removes a plain Identity.
    with record.stop_recording():
        seen = tf.identity(tensor)

    def backward(cotangent):
        instead = on_cotangent(cotangent)
        return [cotangent if instead is None else instead]

    record.record_operation_backprop_only(
        "Observed", [seen], [tensor], backward
    )
    return seen


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


def evaluating(model):
    return contextlib.nullcontext()


def compiled(function):
    def dense(tensors):
        # Make the sparse gradient of an embedding dense, because a compiled
        # program cannot return sparse gradients.
        return tf.nest.map_structure(tf.convert_to_tensor, function(tensors))

    def run(tensors):
        # Trace the function, but do not compile it yet. `jit_compile=True`
        # traces loops in the form that XLA needs.
        traced = tf.function(dense, jit_compile=True, autograph=False)
        traced = traced.get_concrete_function(tensors)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in traced.inputs]
        evaluate = compiled_program(*_numbered(traced), tuple(specs))
        captured = [outside for outside, _ in traced.graph.captures]
        return evaluate([*tensors, *captured])

    return run


def _numbered(traced):
    """Returns a function's graph with numbered nodes, its inputs and outputs.

    With numbers as names, equal functions have equal graphs.
    """
    graph = traced.graph.as_graph_def()
    numbers = {node.name: f"n{i}" for i, node in enumerate(graph.node)}

    def numbered(reference):
        control = "^" if reference.startswith("^") else ""
        name, colon, output = reference.removeprefix("^").partition(":")
        return control + numbers[name] + colon + output

    for node in graph.node:
        node.name = numbered(node.name)
        node.input[:] = map(numbered, node.input)
        # Remove `_class`, which refers to other nodes by their old names.
        node.attr.pop("_class", None)
    return (
        graph.SerializeToString(deterministic=True),
        tuple(numbered(t.op.name) for t in traced.inputs),
        tuple(numbered(t.name) for t in traced.outputs),
    )


# Many layers of a model are equal, and a diagnosis runs each layer many times.
# Without the cache, each run would compile the layer's function in 0.15 s.
@functools.lru_cache(maxsize=256)
def compiled_program(text, inputs, outputs, specs):
    """Returns the function of a graph, compiled by XLA."""
    graph = tf.compat.v1.GraphDef.FromString(text)
    # Remove the nodes that stand for the graph's inputs, because XLA does not
    # support such nodes.
    own = [node for node in graph.node if node.name not in inputs]
    used = {name.partition(":")[0] for node in own for name in node.input}
    del graph.node[:]
    graph.node.extend(own)

    @tf.function(jit_compile=True, autograph=False)
    def evaluate(tensors):
        given = dict(zip(inputs, tensors, strict=True))
        given = {f"{n}:0": t for n, t in given.items() if n in used}
        return tf.graph_util.import_graph_def(graph, given, outputs, name="")

    # Return a concrete function. If callers called `evaluate` directly,
    # TensorFlow would warn about retracing.
    return evaluate.get_concrete_function(list(specs))


def each_operation(function, tensors, visit):
    visiting = False

    def on_operation(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        nonlocal visiting
        # Do not visit operations that are only traced into a graph, because
        # their tensors have no values.
        if graph is None and not visiting:
            visiting = True
            _VISITED.set(op_type)
            visit(_numbers(inputs), _numbers(outputs))
            visiting = False
        return outputs

    op_callbacks.add_op_callback(on_operation)
    try:
        function(tensors)
    finally:
        op_callbacks.remove_op_callback(on_operation)


def visited():
    return tf.compat.as_str(_VISITED.get()), line_of(stack())


def train_step(model, data):
    # Run functions eagerly. A function that is traced during a diagnosis would
    # stay in TensorFlow's cache, and training would use it.
    with step_by_step():
        return model.train_step(data)


def take_step(model, data, traced):
    return train_step(model, data), []


def predict_step(model, data):
    return model.predict_step(data)


@contextlib.contextmanager
def step_by_step():
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with warnings.catch_warnings():
            # Ignore TensorFlow's warning that functions of a dataset still run
            # as graphs.
            warnings.filterwarnings("ignore", "Even though the", UserWarning)
            yield
    finally:
        tf.config.run_functions_eagerly(before)


def loses_assignment(variable):
    return False


def assigned(variable, value):
    # TensorFlow computes the gradient of a variable through its handle. A value
    # in a `StatelessScope` has no handle, so assign to the variable itself.
    if not (variable.trainable and tf.executing_eagerly()):
        return None
    held = stored_value(variable)
    before = tf.identity(held)
    held.assign(tf.cast(value, held.dtype))
    return lambda: held.assign(before)


def run_once(model, function, data):
    return [x if is_concrete(x) else None for x in function(data)]


def _numbers(tensors):
    return [t for t in tensors if t.dtype.is_floating]
