"""What flows where among a model's traced operations."""

import collections
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from keras_mixprec.backend.operations import VANISHING, Operation, Range, Value
from keras_mixprec.formats import SIXTEEN_BITS, Format, get_format
from keras_mixprec.numerics.bounds import add_bounds, bounds_of
from keras_mixprec.numerics.tracing import ModelTrace

# What changes the sign, the size or the dtype of a number and not more.
PASS_THROUGH_OPS = frozenset({"cast", "neg", "slice"})


class Flow:
    """A `ModelTrace` that rules ask where a value comes from and goes.

    Attributes:
        trace: The `ModelTrace`.
        ops_in_16_bits: List of `Operation`, those that make float16 or
            bfloat16 numbers.
    """

    def __init__(self, trace: ModelTrace):
        self.trace = trace
        add_bounds(trace.operations)
        self.ops_in_16_bits = [
            op for op in trace.operations if op.output.dtype in SIXTEEN_BITS
        ]
        self._users = collections.defaultdict(list)
        for operation in trace.operations:
            for value in operation.inputs:
                self._users[id(value)].append(operation)

    def uses(self, value: Value, through=PASS_THROUGH_OPS) -> Iterator:
        """Yields `(operation, value)` where a value is used.

        Args:
            value: A `Value`.
            through: Set of names of operations that it is followed through.
        """
        open_, seen = [value], set()
        while open_:
            value = open_.pop()
            for operation in self._users[id(value)]:
                if id(operation) in seen:
                    continue
                seen.add(id(operation))
                yield operation, value
                if operation.name in through:
                    open_ += operation.outputs

    def used_by(self, value: Value, names, through=PASS_THROUGH_OPS) -> bool:
        """Whether an operation of these names uses a value."""
        return any(op.name in names for op, _ in self.uses(value, through))

    def narrow_sums(self, name: str) -> Iterator:
        """Yields operations of a name whose results are in 16 bits, and dtypes.

        JAX adds up in float32 and casts the sum.
        """
        for operation in self.trace.operations:
            if operation.name != name:
                continue
            casts = [
                use.output.dtype
                for use, _ in self.uses(operation.output, frozenset())
                if use.name == "cast"
            ]
            for dtype in [operation.output.dtype, *casts]:
                if dtype in SIXTEEN_BITS:
                    yield operation, dtype
                    break


def format_of(operation: Operation) -> Format:
    """Returns the format of the numbers that a 16-bit operation makes."""
    return get_format(operation.output.dtype)


def producer_of(value: Value, through=PASS_THROUGH_OPS) -> Operation | None:
    """Returns the operation that made a value, before those of `through`."""
    operation = value.source
    while operation is not None and operation.name in through:
        operation = operation.inputs[0].source
    return operation


def constant_in_code(value: Value) -> float | None:
    """Returns the number that the code has for a constant, else `None`.

    That is its value in the float32 trace, before it is cast to 16 bits.
    """
    operation = value.source
    while operation is not None and operation.name == "cast":
        value = operation.inputs[0]
        operation = value.source
    exact = value.reference.constant if value.reference else None
    return value.constant if exact is None else exact


def rounded_to(number: float, dtype: str) -> float:
    """Returns a number rounded to a floating-point format."""
    with np.errstate(all="ignore"):
        return float(np.asarray(number).astype(keras_dtype(dtype)))


def keras_dtype(dtype: str):
    """Returns the NumPy dtype of that name, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def float32_range(value: Value) -> Range | None:
    """Returns the range of a value in float32 on the data, if known."""
    if value.range is not None:
        return value.range
    return value.reference.range if value.reference else None


def may_be_zero(value: Value) -> bool:
    """Whether a number may be 0 in float16: on the data if there are any."""
    found = float32_range(value)
    if found is not None:
        return found.zero or found.least < VANISHING
    low, high = bounds_of(value)
    return low < VANISHING and high > -VANISHING
