"""Measures the speed of each format against float32."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.devices.timing import compare, seconds_of
from keras_mixprec.policies.matmul_precision import computed_in

# Formats with less than this share of float32's speed are not measured at sizes
# where an operation would take over a second. On many CPUs, float16 is 100
# times slower than float32.
_SLOW = 0.5

# The sizes of operations. An operation of one of these sizes takes tens of
# milliseconds on two CPU cores (`_ON_CPU`) or on a GPU (`_ELSEWHERE`).
_ON_CPU = {
    "matmul": (256, 512, 1024, 1536),
    "convolution": (8, 16, (32, 64, 128, 256)),
    "block": (8, 32, 512),
}
_ELSEWHERE = {
    "matmul": (1024, 2048, 4096, 8192),
    "convolution": (32, 56, (64, 128, 256, 512)),
    "block": (16, 256, 1024),
}
_TRAINING = ("block", "feed-forward")


class Row(NamedTuple):
    """One row of the table of speeds.

    Attributes:
        operation: String: `"matmul"`, `"convolution"`, `"feed-forward"` or
            `"block"`. All operations run forward and backward.
            `"feed-forward"` and `"block"` also update their weights.
        size: String.
        mode: String. How the operation ran: `"XLA"`, `"graph"` or `"eager"`.
        seconds: Float. The time in float32, `None` if it failed.
        ratios: Dict from a format to its speed as a multiple of float32's.
        left_out: Dict from a format to the reason why it has no ratio.
    """

    operation: str
    size: str
    mode: str
    seconds: float | None
    ratios: dict
    left_out: dict


def measure_speed(
    kind: str,
    formats: list[str],
    quick: bool,
    say: Callable = lambda line: None,
) -> list[Row]:
    """Returns the rows of the table.

    Args:
        kind: String, the kind of the default devices.
        formats: List of strings, `"float32"` first.
        quick: Boolean. If `True`, measures one size of each operation, and only
            the feed-forward half of the block, because attention takes seconds
            to compile.
        say: Function that shows a line of progress.
    """
    slowest = dict.fromkeys(formats, 1.0)
    rows = []
    for operation, size, mode, workload in _plan(kind, quick):
        say(f"{operation} {size}, {mode}")
        steps = {f: _step(f, workload, mode) for f in formats}
        try:
            # The first call compiles, so it is not timed.
            steps["float32"]()
            seconds = seconds_of(steps["float32"])
        except Exception as error:  # Memory may run out, for example.
            why = {"float32": one_line(error)}
            rows.append(Row(operation, size, mode, None, {}, why))
            continue
        slow = [
            f
            for f, ratio in slowest.items()
            if ratio < _SLOW and seconds > ratio
        ]
        tried = {f: steps[f] for f in formats if f not in slow}
        found = compare(tried, 0.3 if quick else 1.2)
        why = {f: f"was {1 / slowest[f]:.0f} times slower above" for f in slow}
        left_out = why | found.errors
        rows.append(
            Row(operation, size, mode, found.seconds, found.ratios, left_out)
        )
        for format, ratio in found.ratios.items():
            slowest[format] = min(slowest[format], ratio)
    return rows


def training_speed(rows: list[Row]) -> dict[str, float]:
    """Returns the ratios of the row that measures a whole training step."""
    trained = (row.ratios for row in rows if row.operation in _TRAINING)
    return next(trained, {})


def _step(format, workload, mode):
    """Returns a training step in a format, built on the first call."""
    dtype = "float32" if format == "tf32" else format
    made = functools.cache(lambda: training_step(*workload, dtype, mode))

    def run():
        with products_in(format):
            return made()()

    return run


def _plan(kind, quick):
    """Yields operation, size, mode and workload."""
    sizes = _ON_CPU if kind == "cpu" else _ELSEWHERE
    # Measure speed in the mode that `fit` uses by default.
    mode = active.runtime().MODES[0]
    some = slice(1, 2) if quick else slice(None)
    for n in sizes["matmul"][some]:
        yield "matmul", f"{n} x {n}", mode, matmul(n)
    count, height, channels = sizes["convolution"]
    for n in channels[some]:
        size = f"{count} x {height} x {height} x {n}"
        given = convolution(count, height, n)
        yield "convolution", size, mode, given
    batch, length, width = sizes["block"]
    given = block(batch, length, width, attention=not quick)
    yield _TRAINING[quick], f"{batch} x {length} x {width}", mode, given


_HEADS = 8


def matmul(size: int):
    """Returns a product of square matrices, and its arguments."""
    return _product, [_normal(size, size), _normal(size, size)]


def convolution(count: int, height: int, channels: int):
    """Returns a 3 x 3 convolution of square images, and its arguments."""
    inputs = _normal(count, height, height, channels)
    return _convolution, [inputs, _normal(3, 3, channels, channels)]


def block(batch: int, length: int, width: int, attention: bool):
    """Returns a transformer block, or its feed-forward half, and its weights.

    In training the weights are float32 variables, as under a mixed policy, and
    each step updates them.
    """
    shapes = [(width, 4 * width), (4 * width, width)]
    if attention:
        shapes = [(width, 3 * width), (width, width), *shapes]
    weights = [_normal(*shape) for shape in shapes]
    return _block, [_normal(batch, length, width), *weights]


def training_step(function, arrays: list, dtype: str, mode: str):
    """Returns a function that runs one step and waits for its results.

    Args:
        function: Function of a list of tensors and a dtype, such as `_product`.
        arrays: List of float32 arrays, from which the tensors are made.
        dtype: String. The compute dtype.
        mode: String, one of the backend's `MODES`.
    """
    runtime, replay = active.runtime(), active.replay()
    # A product in a model gets inputs that already have the compute dtype, so
    # casts are not timed. Only a block has float32 variables, which each step
    # casts.
    own = "float32" if function is _block else dtype
    tensors = [ops.convert_to_tensor(array, own) for array in arrays]

    def step(tensors):
        outputs, gradients = replay.vjp(
            lambda tensors: [function(tensors, dtype)],
            tensors,
            # Use the outputs as cotangents. Their values do not matter, because
            # only time counts.
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
    """Context with float32 products in TF32 for `"tf32"`, else in float32.

    Some backends use TF32 by default, but the reference must be float32.
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
    # Keras' LayerNormalization computes its statistics in float32 as well.
    wide = ops.cast(x, "float32")
    mean, variance = ops.moments(wide, axes=-1, keepdims=True)
    return ops.cast((wide - mean) * ops.rsqrt(variance + 1e-3), x.dtype)


def _normal(*shape):
    # The numbers are small, so that products stay within float16's range.
    random = np.random.default_rng(len(shape))
    return random.standard_normal(shape, "float32") * 0.05
