"""Computes norms of many gradients in few operations."""

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import get_format

FLOAT32_MAX = get_format("float32").maximum

# The maximum number of elements in a gradient that is stacked with other
# gradients of its shape. With stacks, 200 small gradients need a handful of
# kernels instead of 200. For larger gradients, the copy into the stack costs
# more than the kernel launch that it saves.
_LARGEST_STACKED = 2**16

# The squares of float32 numbers above 2**64 overflow. After scaling by 2**-80,
# even 2**30 squares of the largest numbers can be summed.
_DOWN = 2.0**-80


# Several rows of a sparse gradient may have the same index and are then summed.
# The sum of up to 2**24 rows is at most 2**12 times their norm. So a norm below
# 2**-12 times float32's maximum rules out overflow in the sum.
_SPARSE_SHARE = 2.0**-12


def largest_norms(gradients):
    """Returns for each gradient the largest norm that counts as finite."""
    is_sparse = active.step().is_sparse
    shares = [_SPARSE_SHARE if is_sparse(g) else 1.0 for g in gradients]
    return np.array(shares, "float32") * FLOAT32_MAX


def grouped_norms(gradients, sums_of_squares, choose=None):
    """Returns the float32 2-norms of dense gradients, in their order.

    Args:
        gradients: List of tensors.
        sums_of_squares: Function `(tensor, axes)` that sums the squares of a
            float32 tensor over `axes`, a tuple of ints.
        choose: Function `(condition, if_true, if_false)` that returns the
            result of one of two functions. `None` if the sums of squares are
            float64, which cannot overflow.
    """
    groups = _group_by_shape(gradients)
    # Do not stack a single tensor. XLA may store a matrix product transposed,
    # and a stack would copy the product. The copy takes 3% of a train step of
    # six Dense(1024) layers.
    tensors = [
        ops.cast(gradients[group[0]], "float32")
        if len(group) == 1
        else ops.stack([ops.cast(gradients[i], "float32") for i in group])
        for group in groups
    ]
    first = [0 if len(group) == 1 else 1 for group in groups]

    def all_sums(factor=None):
        scaled = tensors if factor is None else [t * factor for t in tensors]
        sums = [
            sums_of_squares(t, tuple(range(start, len(t.shape))))
            for t, start in zip(scaled, first, strict=True)
        ]
        return ops.concatenate([ops.reshape(s, (-1,)) for s in sums])

    plain = all_sums()
    if choose is None:
        norms = ops.cast(ops.sqrt(plain), "float32")
        return _restore_order(norms, groups)
    finite = ops.isfinite(plain)

    def lowered():
        # The factor that scales gradients down must not be a constant c. For a
        # gradient x with one element, XLA would rewrite (x * c) ** 2 as x * x *
        # c * c, which is infinity times zero.
        factor = ops.where(ops.all(finite), np.float32(1), np.float32(_DOWN))
        low = ops.sqrt(all_sums(factor)) / factor
        return ops.where(finite, ops.sqrt(plain), low)

    result = choose(ops.all(finite), lambda: ops.sqrt(plain), lowered)
    return _restore_order(result, groups)


def grouped_kinds(gradients):
    """Returns float32 `(n, 3)`: 1 if a gradient has inf, -inf or NaN, else 0.

    Args:
        gradients: List of dense tensors.
    """
    groups = _group_by_shape(gradients)
    rows = []
    for group in groups:
        stack = ops.stack([gradients[i] for i in group])
        axes = tuple(range(1, len(stack.shape)))
        tests = (
            ops.equal(stack, np.inf),
            ops.equal(stack, -np.inf),
            ops.isnan(stack),
        )
        rows.append(ops.stack([ops.any(t, axis=axes) for t in tests], axis=1))
    return _restore_order(ops.cast(ops.concatenate(rows), "float32"), groups)


def grouped_map(function, tensors):
    """Applies an elementwise function to each tensor."""
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
        # Do not stack sparse gradients, whose number of rows may be unknown.
        alone = None in shape or np.prod(shape) > _LARGEST_STACKED
        key = (shape, tensor.dtype, index if alone else None)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _restore_order(values, groups):
    order = np.argsort([index for group in groups for index in group])
    if np.array_equal(order, np.arange(len(order))):
        return values
    return ops.take(values, order, axis=0)
