"""What is timed: products, convolutions and a block, forward and backward."""

from contextlib import AbstractContextManager

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.policies.matmul_precision import computed_in

_HEADS = 8


def matmul(size: int):
    """Returns a product of square matrices, and what it is given."""
    return _product, [_normal(size, size), _normal(size, size)]


def convolution(count: int, height: int, channels: int):
    """Returns a 3 x 3 convolution of square images, and what it is given."""
    inputs = _normal(count, height, height, channels)
    return _convolution, [inputs, _normal(3, 3, channels, channels)]


def block(batch: int, length: int, width: int, attention: bool):
    """Returns a transformer block, or its feed-forward half, and its weights.

    In training these are float32 variables, which are updated in each step, as
    under a mixed policy.
    """
    shapes = [(width, 4 * width), (4 * width, width)]
    if attention:
        shapes = [(width, 3 * width), (width, width), *shapes]
    weights = [_normal(*shape) for shape in shapes]
    return _block, [_normal(batch, length, width), *weights]


def training_step(function, arrays: list, dtype: str, mode: str):
    """Returns a function that runs it forward and backward, and waits.

    Args:
        function: Function of a list of tensors, as the ones of this module.
        arrays: List of float32 arrays, what it is given.
        dtype: String. What it computes in.
        mode: String, one of the backend's `MODES`.
    """
    runtime, replay = active.runtime(), active.replay()
    # What a Dense or convolutional layer is given is in the dtype already; a
    # step casts its variables itself.
    own = "float32" if function is _block else dtype
    tensors = [ops.convert_to_tensor(array, own) for array in arrays]

    def step(tensors):
        outputs, gradients = replay.vjp(
            lambda tensors: [function(tensors, dtype)],
            tensors,
            # As large as what came out, and known only when it did.
            lambda outputs: outputs,
        )
        if function is not _block:
            return outputs + gradients
        updated = zip(tensors, gradients, strict=True)
        return [value - 0.001 * gradient for value, gradient in updated]

    compiled = runtime.compiled(step, mode)

    def run():
        results = compiled(tensors)
        runtime.wait(results)
        return results

    return run


def products_in(format: str) -> AbstractContextManager:
    """Context in which float32 products are in TF32 for it, else in float32.

    What float32 is compared with is float32, not what is the default.
    """
    return computed_in("tf32" if format == "tf32" else "float32")


def _product(tensors, dtype):
    return ops.matmul(*tensors)


def _convolution(tensors, dtype):
    return ops.conv(*tensors, padding="same", data_format="channels_last")


def _block(tensors, dtype):
    x, *attention, widening, narrowing = (ops.cast(t, dtype) for t in tensors)
    if attention:
        x = x + _attended(_normed(x), *attention)
    hidden = ops.relu(ops.matmul(_normed(x), widening))
    return x + ops.matmul(hidden, narrowing)


def _attended(x, mixing, joining):
    batch, length, width = x.shape
    shape = batch, length, 3, _HEADS, width // _HEADS
    mixed = ops.reshape(ops.matmul(x, mixing), shape)
    q, k, v = ops.unstack(mixed, axis=2)
    scores = ops.einsum("bqhd,bkhd->bhqk", q, k) * shape[-1] ** -0.5
    attended = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), v)
    return ops.matmul(ops.reshape(attended, x.shape), joining)


def _normed(x):
    # In float32, as Keras' LayerNormalization computes.
    wide = ops.cast(x, "float32")
    mean, variance = ops.moments(wide, axes=-1, keepdims=True)
    return ops.cast((wide - mean) * ops.rsqrt(variance + 1e-3), x.dtype)


def _normal(*shape):
    # Small enough that products stay within float16's range.
    random = np.random.default_rng(len(shape))
    return random.standard_normal(shape, "float32") * 0.05
