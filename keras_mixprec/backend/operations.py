"""Operations of a traced function, in names that all backends share.

| name | what |
|---|---|
| `add` `sub` `mul` `div` `neg` `abs` `sign` `maximum` `minimum` `clip` | |
| `exp` `expm1` `log` `log1p` `sqrt` `rsqrt` `square` `pow` `reciprocal` | |
| `sigmoid` `tanh` `relu` `softplus` `erf` `sin` `cos` `acos` `cosh` | |
| `sum` `mean` `max` `min` `prod` `argmax` `norm` `pool` | reductions |
| `cumsum` `cumprod` `softmax` `log_softmax` | along an axis |
| `matmul` `conv` | products |
| `solve` | linear systems, inverses, factorizations, eigenvalues |
| `cast` `select` `compare` `concat` `slice` `gather` `arange` | the rest |

Whatever else there is has the backend's own name. Reshaping, transposing and
broadcasting make no operation: their result is the same `Value`.
"""

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from keras import tree

# A constant with more elements than this is not read.
_READ_AT_MOST = 1 << 20

# Float16 rounds smaller magnitudes to 0.
VANISHING = 2.0**-25


# What makes one number of several.
REDUCING = frozenset(
    {"sum", "mean", "max", "min", "prod", "argmax", "norm", "pool"}
)


class Range(NamedTuple):
    """What the numbers of a tensor are.

    Attributes:
        low, high: Floats, of the finite ones.
        least: Float. The smallest magnitude that is not 0; infinity if none.
        zero: Boolean. Whether any is 0.
        vanishing: Float. Share of those that are not 0 which float16 rounds
            to 0.
        deviation: Float. The standard deviation of the finite ones.
        finite: Boolean. Whether all are.
        unit: Float. A power of two that all are known to be multiples of; 0
            if none is known.
    """

    low: float
    high: float
    least: float
    zero: bool
    vanishing: float
    deviation: float
    finite: bool
    unit: float = 0.0

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(-self.low, self.high)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """What an operation is given or makes.

    Attributes:
        dtype: String, as Keras spells it.
        shape: Tuple, `None` for a size that is not known.
        source: The `Operation` that makes it; `None` for what the function is
            given, and for constants.
        bounds: Pair of floats that all of it lies between, if that is known:
            of constants at first.
        range: `Range` of what it was when the function ran, or `None`.
        reference: The `Value` in its place in the float32 trace, or `None`.
    """

    dtype: str
    shape: tuple
    source: "Operation | None" = None
    bounds: tuple[float, float] | None = None
    range: Range | None = None
    reference: "Value | None" = None

    @property
    def constant(self) -> float | None:
        """The number that all of it is, `None` if not known to be one."""
        if self.source is not None or self.bounds is None:
            return None
        low, high = self.bounds
        return low if low == high else None

    @property
    def size(self) -> int:
        """Number of elements; sizes that are not known count as 1."""
        return math.prod(n or 1 for n in self.shape)


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """One operation of a traced function.

    Attributes:
        name: String, see above.
        inputs: List of `Value`.
        outputs: List of `Value`.
        scope: String. The innermost `scope` that it was called in.
        reduced: Int. How many numbers become one: of reductions, products and
            sums along an axis. Else 1.
        exponent: Float. Of a `pow` with a constant one, else `None`. One of 2
            is a `square`.
    """

    name: str
    inputs: list
    outputs: list
    scope: str
    reduced: int = 1
    exponent: float | None = None

    @property
    def output(self) -> Value:
        """The first result."""
        return self.outputs[0]


class Traced(NamedTuple):
    """What `operations` returns.

    Attributes:
        operations: List of `Operation`, in the order of the calls.
        inputs: List of `Value`, of what the function is given.
        error: The exception that ended it early, or `None`.
    """

    operations: list
    inputs: list
    error: Exception | None = None


def constant(number: Any, dtype: str | None = None) -> Value:
    """Returns the `Value` of numbers that are known.

    Args:
        number: A number or an array.
        dtype: String. Defaults to that of the array.
    """
    array = np.asarray(number)
    value = Value(dtype or str(array.dtype), array.shape)
    if 0 < array.size <= _READ_AT_MOST and array.dtype.kind not in "OSU":
        wide = array.astype("float64")
        value.bounds = float(wide.min()), float(wide.max())
    return value


class _Call(NamedTuple):
    """What is kept of a call that others may be like."""

    given: list
    operations: list
    outputs: Any


class Recording:
    """Records operations as they are called, by the tensors' identity.

    Args:
        values: Mapping from tensors to `Value`s.
        names: Dict from the backend's names to those above.
        views: Set of the backend's names of what only reshapes.
        describe: Function of a tensor that returns its `Value`, unknown.
        read: Function of a tensor or a number from outside of the function
            that returns the `Value` of a constant.
        copy: Function of a tensor that returns another one like it.
    """

    _active: "Recording | None" = None

    def __init__(
        self, values, names: dict, views: frozenset, describe, read, copy
    ):
        self.operations = []
        self.values = values
        self._scope = ""
        self._calls: dict[Any, _Call] = {}
        self._copy = copy
        self._names = names
        self._views = views
        self._describe = describe
        self._read = read

    @contextlib.contextmanager
    def active(self):
        """`call` is about this one within the context."""
        outer, Recording._active = Recording._active, self
        try:
            yield
        finally:
            Recording._active = outer

    def called(self, run, scope: str, key, given: list):
        """Returns `run()`, whose operations are recorded as of a scope.

        Where a call had this key before, its operations are recorded once
        more, of what is given now, and nothing runs: for tracing, TensorFlow
        takes 0.4 ms an operation, 8,000 of which are in a ResNet50.

        Args:
            run: Function without arguments that returns a structure of
                tensors.
            scope: String.
            key: Hashable that says what the operations are, or `None`.
            given: List of the tensors that they are of.
        """
        outer, self._scope = self._scope, scope
        try:
            if key is None:
                return run()
            values = list(map(self.value, given))
            if key in self._calls:
                return self._again(self._calls[key], values)
            start = len(self.operations)
            outputs = run()
            made = self.operations[start:]
            self._calls[key] = _Call(values, made, outputs)
            return outputs
        finally:
            self._scope = outer

    def _again(self, call, given):
        new = dict(zip(map(id, call.given), given, strict=True))
        for operation in call.operations:
            for value in operation.inputs:
                if value.source is None and id(value) not in new:
                    new[id(value)] = dataclasses.replace(value)  # A constant.
            made = [dataclasses.replace(v) for v in operation.outputs]
            new |= zip(map(id, operation.outputs), made, strict=True)
            found = dataclasses.replace(
                operation,
                inputs=[new.get(id(v), v) for v in operation.inputs],
                outputs=made,
                scope=self._scope,
            )
            for value in made:
                value.source = found
            self.operations.append(found)

        def copied(tensor):
            value = self.value(tensor)
            copy = self._copy(tensor)
            self.values[copy] = new.get(id(value), value)
            return copy

        return tree.map_structure(copied, call.outputs)

    def given(self, tensor) -> Value:
        """Returns the `Value` of what the function is given."""
        self.values[tensor] = value = self._describe(tensor)
        return value

    def value(self, tensor) -> Value:
        """Returns the `Value` of a tensor or a number."""
        try:
            return self.values[tensor]
        except (KeyError, TypeError):
            return self._read(tensor)

    def add(self, name: str, inputs: list, outputs: list, **details) -> list:
        """Records one call, unless it only reshapes.

        Args:
            name: String, the backend's.
            inputs: List of tensors and numbers.
            outputs: List of tensors.
            details: What else is known of the `Operation`.

        Returns:
            List of the `Value`s that are new.
        """
        values = list(map(self.value, inputs))
        made = list(map(self._describe, outputs))
        if not made:
            return []
        if name in self._views and values:
            self.values[outputs[0]] = values[0]
            return []
        name = self._names.get(name, name)
        if details.get("exponent") == 2:
            name, values = "square", values[:1]
        if name in REDUCING and inputs:
            # Its size here: a `Value` has that before it was broadcast.
            size = self._describe(inputs[0]).size
            details.setdefault("reduced", size // max(1, made[0].size))
        found = Operation(name, values, made, self._scope, **details)
        for value, tensor in zip(made, outputs, strict=True):
            self.values[tensor] = value
            value.source = found
        self.operations.append(found)
        return made


def call(run, scope, key, given):
    """Returns what the `called` of the active `Recording` does."""
    assert Recording._active is not None
    return Recording._active.called(run, scope, key, given)
