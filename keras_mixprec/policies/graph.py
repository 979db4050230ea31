"""Finds a layer's place in the graph of its model.

A new layer does not know yet if it will be the model's output or feed an `exp`.
Only the finished model shows this.
"""

import itertools

import keras

from keras_mixprec.keras_internals import (
    calls_in,
    flat_layers,
    functional_of,
    inbound_nodes,
    producer,
    sublayers,
)
from keras_mixprec.policies.layers import is_of_keras

# Layers that pass numbers on unchanged. If one of them is the model's last
# layer, the layer before it counts as an output too.
_HANDS_ON = (
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Permute,
    keras.layers.Reshape,
)

_TAKES_AS_IT_IS = (*_HANDS_ON, keras.layers.Concatenate, keras.layers.Masking)

# Operations that TensorFlow's graph rewrite (by its deny list) and
# `torch.autocast` compute in float32. In Keras, such operations have no dtype
# of their own and compute in the dtype of the layers that feed them.
_SENSITIVE_OPERATIONS = {
    "Exp",
    "Exp2",
    "Expm1",
    "Log",
    "Log2",
    "Log10",
    "Power",
    "Square",
    "Reciprocal",
    "Rsqrt",
    "Sum",
    "Prod",
    "Cumsum",
    "Norm",
}


def output_layers(model) -> set[int]:
    """Returns the ids of the layers that make the model's outputs.

    A subclassed model has no graph. Its layers that end in a softmax count as
    outputs.
    """
    if isinstance(model, keras.Sequential):
        layers = model.layers[::-1]
        passed = itertools.takewhile(
            lambda layer: isinstance(layer, _HANDS_ON), layers
        )
        return _ids(layers[: len(list(passed)) + 1])
    if functional_of(model):
        return _ids(_producers(keras.tree.flatten(model.outputs)))
    return {id(layer) for layer in model.layers if _ends_in_softmax(layer)}


def feeds_sensitive_operation(model) -> set[int]:
    """Returns the ids of the layers that feed a sensitive operation.

    The search includes nested functional models.
    """
    found = set()
    for operation in _operations(model):
        name = type(operation).__name__
        if name in _SENSITIVE_OPERATIONS and not _is_layer(operation):
            found |= _ids(_producers(_inputs(operation)))
    return found


def casts_input(layer) -> bool:
    """Returns whether the layer casts its input from a different float dtype.

    The result is `False` in a subclassed model, which has no graph.
    """
    if not layer.autocast:
        return False
    dtypes = {
        feeder.dtype if _is_input(feeder) else feeder.compute_dtype
        for feeder in _feeders(layer)
    }
    return any("float" in dtype for dtype in dtypes - {layer.compute_dtype})


def consumers(functional, tensor) -> list:
    """Returns the operations that compute on a tensor of a graph.

    The search includes nested models. It follows the tensor through operations
    that pass numbers on unchanged, and leaves out operations that make masks.

    Args:
        functional: The functional model that holds the graph.
        tensor: `keras.KerasTensor`, such as an input.
    """
    found = []
    for operation in functional.operations:
        for node in calls_in(functional, operation):
            places = [
                n for n, t in enumerate(node.input_tensors) if t is tensor
            ]
            nested = functional_of(operation)
            for place in places:
                if nested is not None:
                    found += consumers(nested, nested.inputs[place])
                elif isinstance(operation, _TAKES_AS_IT_IS):
                    for output in node.output_tensors:
                        found += consumers(functional, output)
                elif any(t.dtype != "bool" for t in node.output_tensors):
                    found.append(operation)
    return found


def neighbours(model) -> dict[int, tuple[list, list]]:
    """Returns the layers before and the layers after each layer.

    The keys are ids of layers. The search skips operations that are not layers,
    and leaves out inputs. The dict is empty for a subclassed model, which has
    no graph.
    """
    found = {}
    for layer in filter(_is_layer, _operations(model)):
        for feeder in _feeders(layer):
            if not _is_input(feeder):
                found.setdefault(id(layer), ([], []))[0].append(feeder)
                found.setdefault(id(feeder), ([], []))[1].append(layer)
    return found


def _operations(model):
    """Yields the operations in a model's graph and in nested graphs."""
    for functional in filter(None, map(functional_of, flat_layers(model))):
        yield from functional.operations


def _ids(layers):
    ids = set()
    for layer in layers:
        if isinstance(layer, keras.Model):
            ids |= output_layers(layer)
        elif is_of_keras(layer) or not sublayers(layer):
            # The result leaves out a user-written block, because the last layer
            # of the block is unknown and the block may be most of the model.
            ids.add(id(layer))
    return ids


def _producers(tensors, through=_HANDS_ON):
    """Returns the layers that make `tensors`.

    The search looks through operations, and through layers of the classes in
    `through`, which the result includes.
    """
    layers, seen, stack = [], set(), list(tensors)
    while stack:
        operation = producer(stack.pop())
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if _is_layer(operation):
            layers.append(operation)
        if not _is_layer(operation) or isinstance(operation, through):
            stack.extend(_inputs(operation))
    return layers


def _feeders(layer):
    return _producers(_inputs(layer), through=())


def _inputs(operation):
    return [t for node in inbound_nodes(operation) for t in node.input_tensors]


def _is_layer(operation):
    return isinstance(operation, keras.layers.Layer)


def _is_input(operation):
    return isinstance(operation, keras.layers.InputLayer)


def _ends_in_softmax(layer):
    activation = getattr(layer, "activation", None)
    return isinstance(layer, keras.layers.Softmax) or activation in (
        keras.activations.softmax,
        keras.activations.log_softmax,
    )
