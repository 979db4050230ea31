"""Skips an optimizer update inside a TensorFlow step that XLA compiles.

With a `tf.cond` around the update, XLA copies every variable into and out of
the branch. A step of six Dense(1024) layers is then 1.2x slower. Instead, each
assignment selects the new or the old value. XLA fuses the selection with the
update, so the step is only 1.06x slower.
"""

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from keras_mixprec._patched import patched

_READS = {"ReadVariableOp", "VariableShape", "ResourceGather"}


def gated_update(finite, optimizer, update, variables):
    """Runs `update()` so that it changes `variables` only if `finite`.

    Keras' optimizers write through `optimizer.assign`, `assign_add` and
    `assign_sub`. Each of these calls selects the new or the old value. If the
    step is skipped, a variable that is written in a different way (weight
    decay, moving averages, a user's own optimizer) gets its old value back at
    the end.

    Args:
        finite: Boolean scalar tensor.
        optimizer: The inner `keras.optimizers.Optimizer`.
        update: Function without arguments that applies the optimizer.
        variables: List of all variables that the update may write.
    """
    graph = tf.compat.v1.get_default_graph()
    natives = [_native(v) for v in variables]
    before = [v.read_value() for v in natives]
    start = len(graph.get_operations())
    gate = _Gate(finite)
    with gate.on(optimizer):
        update()
    touched = {
        id(tensor)
        for operation in graph.get_operations()[start:]
        if operation.type not in _READS and operation not in gate.operations
        for tensor in operation.inputs
        if tensor.dtype == tf.resource
    }
    for variable, old in zip(natives, before, strict=True):
        if id(graph.capture(variable.handle)) in touched:
            variable.assign(tf.where(finite, variable, old))


class _Gate:
    def __init__(self, finite):
        self._finite = finite
        self.operations = set()

    def on(self, optimizer):
        combinations = {
            "assign": lambda old, new: new,
            "assign_add": lambda old, new: old + new,
            "assign_sub": lambda old, new: old - new,
        }
        methods = {
            name: self._gated(getattr(optimizer, name), combine)
            for name, combine in combinations.items()
        }
        return patched(optimizer, methods)

    def _gated(self, original, combine):
        def assign(variable, value):
            if isinstance(value, tf.IndexedSlices):
                return original(variable, value)
            variable = _native(variable)
            old = variable.read_value()
            new = combine(old, tf.cast(value, variable.dtype))
            graph = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            variable.assign(tf.where(self._finite, new, old))
            self.operations.update(graph.get_operations()[start:])
            return None

        return assign


def _native(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable


def under_xla() -> bool:
    """Returns whether XLA will compile the graph that is being traced."""
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )
