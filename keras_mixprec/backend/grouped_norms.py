"""Norms and products of many gradients in few operations."""

import numpy as np
from keras import ops

# Gradients up to this many elements are stacked by shape, so that 200 small
# variables cost a handful of kernels instead of 200. Stacking copies; above
# 2**16 elements the copy costs more than the kernel launch it saves.
_LARGEST_STACKED = 2**16

# Squares of finite float32 numbers overflow above 2**64. Numbers up to 2**127
# times 2**-80 are squared, and 2**30 of them summed, without overflow.
_DOWN = 2.0**-80


def grouped_norms(gradients, sums_of_squares, choose=None):
    """Returns the float32 2-norms of `gradients`, dense tensors, in order.

    Args:
        gradients: List of tensors.
        sums_of_squares: Function from a float32 tensor `(k, ...)` to the
            `(k,)` sums of squares of its rows.
        choose: Function `(condition, if_true, if_false)` that evaluates one
            of two functions, or both. Not needed, and `None`, where sums of
            squares are float64, which cannot overflow.
    """
    groups = _group_by_shape(gradients)
    stacks = [
        ops.stack([ops.cast(gradients[i], "float32") for i in group])
        if len(group) > 1
        else ops.cast(gradients[group[0]], "float32")[None]
        for group in groups
    ]

    plain = ops.concatenate([sums_of_squares(stack) for stack in stacks])
    if choose is None:
        norms = ops.cast(ops.sqrt(plain), "float32")
        return _restore_order(norms, groups)
    finite = ops.isfinite(plain)

    def lowered():
        # Not the constant itself: of a gradient of one element, XLA makes
        # (x * c) ** 2 into x * x * c * c, which is infinity times zero.
        factor = ops.where(ops.all(finite), np.float32(1), np.float32(_DOWN))
        sums = [sums_of_squares(stack * factor) for stack in stacks]
        low = ops.sqrt(ops.concatenate(sums)) / factor
        return ops.where(finite, ops.sqrt(plain), low)

    result = choose(ops.all(finite), lambda: ops.sqrt(plain), lowered)
    return _restore_order(result, groups)


def grouped_map(function, tensors):
    """Returns the elementwise `function` of each of `tensors`."""
    results = {}
    for group in _group_by_shape(tensors):
        if len(group) == 1:
            results[group[0]] = function(tensors[group[0]])
        else:
            stack = function(ops.stack([tensors[i] for i in group]))
            results.update(zip(group, ops.unstack(stack), strict=True))
    return [results[index] for index in range(len(tensors))]


def _group_by_shape(tensors):
    groups = {}
    for index, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        # How many rows a sparse gradient has, only the batch says.
        alone = None in shape or np.prod(shape) > _LARGEST_STACKED
        key = (shape, tensor.dtype, index if alone else None)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _restore_order(values, groups):
    order = np.argsort([index for group in groups for index in group])
    if np.array_equal(order, np.arange(len(order))):
        return values
    return ops.take(values, order)
