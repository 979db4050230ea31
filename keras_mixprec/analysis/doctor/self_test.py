"""Checks a device's results against float64 NumPy."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from keras import ops

from keras_mixprec._console import one_line
from keras_mixprec.analysis.doctor.findings import Finding
from keras_mixprec.analysis.doctor.speed import products_in
from keras_mixprec.backend import active

# The number of terms in each sum. With this number, errors show whether a
# device sums in bfloat16, because a bfloat16 sum stops growing halfway.
_TERMS = 512

# Bits after the binary point in the numbers of each format.
_DIGITS = {"float32": 23, "tf32": 10, "bfloat16": 7, "float16": 10}

# The maximum relative error of a usable result. A result with a larger error is
# "wrong", because training cannot use it.
_GROSS = 1 / 8


class Result(NamedTuple):
    """The error of one operation in one format.

    Attributes:
        format: String.
        operation: String.
        error: Float. The largest error, as a share of the result, or `None`
            without a finite result.
        bound: Float. The largest error that the format allows.
        status: String: `"right"`; `"inaccurate"` (beyond the bound); `"wrong"`
            (not finite, or off by more than an eighth); or `"fails"`.
        note: String.
    """

    format: str
    operation: str
    error: float | None
    bound: float
    status: str
    note: str = ""


def check_formats(formats: list[str]) -> list[Result]:
    """Returns the results of all operations in each of the formats."""
    return [
        _result(format, name, run)
        for format in formats
        for name, run in _OPERATIONS.items()
    ]


def bound(format: str, operation: str) -> float:
    """Returns the largest error that a format allows, as a share of a result.

    A float32 sum of `_TERMS` terms of one sign is off by at most `_TERMS`
    roundings, in any order. Each rounding to the format adds half of
    `2**-digits`. The bound allows 8 roundings: cuBLAS may split a sum into up
    to 8 parts, and TF32 rounds both inputs. Winograd convolutions in float32
    lose up to three more bits. A cast is one rounding.
    """
    unit = 2.0 ** -(_DIGITS[format] + 1)
    if operation == "cast":
        return unit
    summed = (_TERMS + 2) * 2.0**-24
    summed *= 8 if operation == "convolution" else 1
    return summed + (0 if format == "float32" else 8 * unit)


def judge(format: str, operation: str, found, exact) -> Result:
    """Compares a result with the exact result.

    Args:
        format: String.
        operation: String.
        found: Array from the device.
        exact: Float64 array without zeros, the exact result.
    """
    limit = bound(format, operation)
    found = np.asarray(found, "float64")
    if not np.isfinite(found).all():
        return Result(format, operation, None, limit, "wrong", "not finite")
    error = float(np.max(np.abs(found - exact) / np.abs(exact)))
    gross = "wrong" if error > max(_GROSS, limit) else "inaccurate"
    status = "right" if error <= limit else gross
    # Float32 is the reference for all formats, so inaccurate float32 results
    # count as wrong.
    if status == "inaccurate" and format == "float32":
        status = "wrong"
    return Result(format, operation, error, limit, status)


# The text and the level of a finding for each status.
_SAID = {
    "wrong": ("returns wrong results", "error"),
    "inaccurate": ("returns inaccurate results", "warning"),
    "fails": ("fails", "warning"),
}


def judge_results(results: list[Result], device: str) -> list[Finding]:
    """Returns a finding for each format and status other than `"right"`."""
    found = []
    for format, status in dict.fromkeys((r.format, r.status) for r in results):
        if status == "right":
            continue
        said, level = _SAID[status]
        bad = [r for r in results if (r.format, r.status) == (format, status)]
        operations = ", ".join(f"{r.operation} ({_off(r)})" for r in bad)
        finding = Finding(
            f"{status}-{format}",
            # A machine cannot train if its float32 fails, so the finding is an
            # error.
            "error" if format == "float32" else level,
            f"{device} {said} in {format}: {operations}",
            f"do not train in {format} here; update the driver and libraries",
        )
        found.append(finding)
    return found


def _result(format, name, run):
    dtype = "float32" if format == "tf32" else format
    with products_in(format):
        try:
            return judge(format, name, *run(dtype))
        except Exception as error:
            limit = bound(format, name)
            return Result(format, name, None, limit, "fails", one_line(error))


def _matmul(dtype):
    left, right = _numbers(dtype, 64, _TERMS), _numbers(dtype, _TERMS, 64)
    return _computed(ops.matmul, dtype, left, right), left @ right


def _gradient(dtype):
    """Returns computed and exact gradients for a product's second factor."""
    left, right = _numbers(dtype, _TERMS, 64), _numbers(dtype, 64, 32)

    def gradient(left, right):
        vjp = active.replay().vjp
        product = lambda tensors: [ops.matmul(left, *tensors)]  # noqa: E731
        ones = lambda outputs: [ops.ones_like(outputs[0])]  # noqa: E731
        return vjp(product, [right], ones)[1][0]

    exact = np.repeat(left.sum(axis=0)[:, None], 32, axis=1)
    return _computed(gradient, dtype, left, right), exact


def _convolution(dtype):
    # Each output of the convolution sums 3 x 3 x 57 = 513 terms, which is close
    # to `_TERMS`.
    images, kernel = (
        _numbers(dtype, 2, 10, 10, 57),
        _numbers(dtype, 3, 3, 57, 32),
    )

    def convolve(images, kernel):
        return ops.conv(images, kernel, data_format="channels_last")

    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (1, 2))
    exact = np.einsum("nyxcij,ijcf->nyxf", windows, kernel, optimize=True)
    return _computed(convolve, dtype, images, kernel), exact


def _cast(dtype):
    exact = np.random.default_rng(1).uniform(1, 2, 4096).astype("float32")
    given = ops.convert_to_tensor(exact * 2.0**-10, "float32")
    (found,) = _run(lambda tensors: [ops.cast(tensors[0], dtype)], [given])
    return _array(found) * 2.0**10, exact.astype("float64")


_OPERATIONS = {
    "matmul": _matmul,
    "gradient": _gradient,
    "convolution": _convolution,
    "cast": _cast,
}


def _numbers(dtype, *shape):
    """Returns positive float64 numbers that the dtype holds exactly."""
    random = np.random.default_rng(len(shape) + shape[0])
    held = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return random.uniform(0.5, 1.5, shape).astype(held).astype("float64")


def _computed(function, dtype, *arrays):
    given = [ops.convert_to_tensor(array, dtype) for array in arrays]
    (result,) = _run(lambda tensors: [function(*tensors)], given)
    return _array(result)


def _run(function, tensors):
    runtime = active.runtime()
    return runtime.compiled(function, runtime.MODES[0])(tensors)


def _array(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32")).astype("float64")


def _off(result):
    if result.error is None:
        return result.note
    return f"off by {result.error:.1%}, at most {result.bound:.1%} expected"
