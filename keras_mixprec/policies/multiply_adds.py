"""Estimates a layer's FLOPs, as multiply-adds for one sample.

The estimate uses the shapes that layers were built with. It counts matrix
products, convolutions, attention and recurrence, which take most of a model's
time and which 16-bit units speed up. It does not count elementwise operations.
"""

import math

from keras import layers

from keras_mixprec.keras_internals import own_non_trainable, own_trainable
from keras_mixprec.policies.layers import LayerEntry, is_of_keras


def multiply_adds(entry: LayerEntry) -> int | None:
    """Returns a layer's own multiply-adds in the forward pass of one sample.

    Args:
        entry: A `LayerEntry`. The work of its sublayers is not counted. A layer
            inside an RNN or a `TimeDistributed` counts once per step.

    Returns:
        An int, 0 for a layer that multiplies nothing. `None` if the work is
        unknown, as for unbuilt layers, variable sizes, and user-written layers
        with weights.
    """
    layer = entry.layer
    if not layer.built:
        return None
    try:
        return _own(entry) * _steps(entry)
    except _Unknown:
        return None


class _Unknown(Exception):
    """Raised if the estimate needs a size that is unknown."""


def _own(entry):
    layer = entry.layer
    if isinstance(layer, layers.EinsumDense):
        return _einsum_dense(entry)
    for kinds, estimate in _ESTIMATES:
        if isinstance(layer, kinds):
            return estimate(layer)
    if is_of_keras(layer) or not own_trainable(layer):
        return 0
    raise _Unknown


def _einsum_dense(entry):
    layer = entry.layer
    inputs, kernel = layer.equation.partition("->")[0].split(",")
    shape = getattr(layer, "original_kernel_shape", None) or layer.kernel.shape
    if len(shape) != len(kernel):
        raise _Unknown  # A quantized kernel may be stored as a matrix.
    sizes = zip(kernel, shape, strict=True)
    # Each input element is multiplied once for each position along the kernel
    # axes that the input lacks.
    added = [size for label, size in sizes if label not in inputs]
    return _size(_einsum_input_shape(entry)[1:]) * _size(added)


def _einsum_input_shape(entry):
    shape = _input_shape(entry.layer)
    attention = (layers.MultiHeadAttention, layers.GroupQueryAttention)
    holder = entry.parent.layer if entry.parent else None
    if None in shape[1:] and isinstance(holder, attention):
        # Attention builds its output projection for any length, but the length
        # of its query is known.
        query = _build_shapes(holder)["query_shape"]
        return (shape[0], *query[1:-1], *shape[-2:])
    return shape


def _kernels(layer):
    """Returns the work of a layer that applies kernels at every position."""
    shape = _input_shape(layer)
    # A transposed convolution applies its kernel at each input position. All
    # other layers apply their kernels at each output position.
    if not type(layer).__name__.endswith("Transpose"):
        shape = layer.compute_output_shape(shape)
    first = getattr(layer, "data_format", "") == "channels_first"
    positions = _size(shape[2:] if first else shape[1:-1])
    held = [*own_trainable(layer), *own_non_trainable(layer)]
    kernels = [v.shape for v in held if v.name.endswith("kernel")]
    return sum(map(_size, kernels)) * positions


def _scores(layer, per_pair):
    """Returns the work to multiply queries by keys, and scores by values."""
    shapes = _build_shapes(layer)
    pairs = (*shapes["query_shape"][1:-1], *shapes["value_shape"][1:-1])
    return per_pair * _size(pairs)


def _multi_head_attention(layer):
    return _scores(layer, layer.num_heads * (layer.key_dim + layer.value_dim))


def _grouped_query_attention(layer):
    return _scores(layer, 2 * layer.num_query_heads * layer.head_dim)


def _attention(layer):
    query, value = _input_shape(layer)[:2]
    return _size(query[1:-1]) * _size(value[1:-1]) * (query[-1] + value[-1])


def _dot(layer):
    first, second = _input_shape(layer)
    output = layer.compute_output_shape([first, second])
    axis = layer.axes if isinstance(layer.axes, int) else layer.axes[0]
    return _size(output[1:]) * _size([first[axis]])


def _cell(layer):
    return sum(_size(w.shape) for w in own_trainable(layer)[:2])


_ESTIMATES = (
    (
        (
            layers.Dense,
            layers.Conv1D,
            layers.Conv2D,
            layers.Conv3D,
            layers.Conv1DTranspose,
            layers.Conv2DTranspose,
            layers.Conv3DTranspose,
            layers.DepthwiseConv1D,
            layers.DepthwiseConv2D,
            layers.SeparableConv1D,
            layers.SeparableConv2D,
        ),
        _kernels,
    ),
    (layers.MultiHeadAttention, _multi_head_attention),
    (layers.GroupQueryAttention, _grouped_query_attention),
    (layers.Attention, _attention),
    (layers.Dot, _dot),
    ((layers.SimpleRNNCell, layers.LSTMCell, layers.GRUCell), _cell),
)


def _steps(entry):
    """Returns how many times a layer's wrappers run the layer per sample."""
    steps = 1
    for holder in list(entry.lineage())[1:]:
        if isinstance(holder.layer, (layers.RNN, layers.TimeDistributed)):
            steps *= _size(_input_shape(holder.layer)[1:2])
    return steps


def _input_shape(layer):
    shapes = _build_shapes(layer)
    return next(iter(shapes.values())) if isinstance(shapes, dict) else shapes


def _build_shapes(layer):
    config = layer.get_build_config() or {}
    shapes = config.get("input_shape") or config.get("shapes_dict")
    if not shapes:
        raise _Unknown
    return shapes


def _size(shape):
    if None in shape:
        raise _Unknown
    return math.prod(shape)
