"""Bounds of what operations make, as far as they follow from the operations.

In real numbers: a softmax lies between 0 and 1, both of which it reaches once
it is rounded.
"""

import math

from keras_mixprec.backend.operations import Operation, Value

_ANY = (-math.inf, math.inf)
_POSITIVE = (0.0, math.inf)

_FIXED = {
    "abs": _POSITIVE,
    "compare": (0.0, 1.0),
    "cosh": (1.0, math.inf),
    "cos": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "exp": _POSITIVE,
    "log_softmax": (-math.inf, 0.0),
    "norm": _POSITIVE,
    "relu": _POSITIVE,
    "rsqrt": _POSITIVE,
    "sigmoid": (0.0, 1.0),
    "sign": (-1.0, 1.0),
    "sin": (-1.0, 1.0),
    "softmax": (0.0, 1.0),
    "softplus": _POSITIVE,
    "sqrt": _POSITIVE,
    "square": _POSITIVE,
    "tanh": (-1.0, 1.0),
}

_SAME = {"cast", "max", "min", "mean", "slice", "pool", "gather"}

# What leaves it open which of its inputs a number is.
_HULL = {"concat", "select"}


def add_bounds(operations: list[Operation]):
    """Sets `bounds` of what operations make, where there are none.

    Args:
        operations: List of `Operation`, in the order of the calls.
    """
    for operation in operations:
        for value in operation.outputs:
            if value.bounds is None:
                value.bounds = _bounds(operation)


def bounds_of(value: Value) -> tuple[float, float]:
    """Returns the bounds of a value, infinite if not known."""
    if value.bounds is not None:
        return value.bounds
    return (0.0, 1.0) if value.dtype == "bool" else _ANY


def is_shifted(value: Value) -> bool:
    """Whether it is `x - max(x)`, which is 0 somewhere and nowhere above."""
    operation = value.source
    while operation is not None and operation.name in ("cast", "select"):
        operation = operation.inputs[0].source
    if operation is None or operation.name != "sub":
        return False
    return _is_maximum(operation.inputs[1])


def _is_maximum(value, depth=6):
    operation = value.source
    if operation is None or depth == 0:
        return False
    if operation.name == "max":
        return True
    if operation.name in ("cast", "select", "maximum"):
        return any(_is_maximum(v, depth - 1) for v in operation.inputs)
    return False


def _bounds(operation):
    name, inputs = operation.name, operation.inputs
    if name in _FIXED:
        return _fixed(operation)
    known = [bounds_of(value) for value in inputs]
    if not known:
        return _ANY
    if name in _SAME:
        return known[0]
    if name in _HULL:
        return _hull(known)
    rule = _RULES.get(name)
    return rule(operation, *known) if rule else _ANY


def _fixed(operation):
    low, high = _FIXED[operation.name]
    if operation.name == "exp":
        value = operation.inputs[0]
        top = 0.0 if is_shifted(value) else bounds_of(value)[1]
        return low, math.exp(min(top, 700.0))
    if operation.name == "sqrt":
        below, above = bounds_of(operation.inputs[0])
        return math.sqrt(max(below, 0.0)), math.sqrt(max(above, 0.0))
    return low, high


def _hull(known):
    return min(low for low, _ in known), max(high for _, high in known)


def _add(operation, *known):
    return sum(low for low, _ in known), sum(high for _, high in known)


def _sub(operation, a, b, *_):
    if is_shifted(operation.output):
        return -math.inf, 0.0
    return a[0] - b[1], a[1] - b[0]


def _neg(operation, a):
    return -a[1], -a[0]


def _mul(operation, a, b, *_):
    first, second = operation.inputs[:2]
    if first is second:
        return _POSITIVE
    products = [_times(p, q) for p in a for q in b]
    return min(products), max(products)


def _times(p, q):
    return 0.0 if 0.0 in (p, q) else p * q


def _div(operation, a, b, *_):
    if b[0] > 0 or b[1] < 0:
        parts = [
            _times(p, 1 / q if abs(q) < math.inf else 0.0) for p in a for q in b
        ]
        return min(parts), max(parts)
    return _POSITIVE if a[0] >= 0 and b[0] >= 0 else _ANY


def _sum(operation, a, *_):
    low, high = (_times(end, operation.reduced) for end in a)
    source = operation.inputs[0].source
    while source is not None and source.name == "cast":
        source = source.inputs[0].source
    exponential = source is not None and source.name == "exp"
    if exponential and is_shifted(source.inputs[0]):
        return 1.0, high
    return min(low, a[0]) if a[0] < 0 else a[0], high


def _product(operation, a, b, *_):
    if operation.inputs[0] is operation.inputs[1] or a[0] < 0 or b[0] < 0:
        return _ANY
    return _POSITIVE


def _pow(operation, a, *_):
    exponent = operation.exponent
    even = exponent is not None and exponent % 2 == 0
    return _POSITIVE if even or a[0] >= 0 else _ANY


def _maximum(operation, *known):
    return max(low for low, _ in known), max(high for _, high in known)


def _minimum(operation, *known):
    return min(low for low, _ in known), min(high for _, high in known)


def _clip(operation, a, *limits):
    if len(limits) < 2:
        return a
    low, high = limits[0][0], limits[1][1]
    return min(max(a[0], low), high), max(min(a[1], high), low)


def _log(operation, a, *_):
    return tuple(math.log(end) if end > 0 else -math.inf for end in a)


def _arange(operation, *known):
    return operation.output.bounds or _ANY


def _argmax(operation, a, *_):
    return 0.0, max(0.0, operation.reduced - 1.0)


_RULES = {
    "add": _add,
    "arange": _arange,
    "argmax": _argmax,
    "clip": _clip,
    "cumsum": _sum,
    "div": _div,
    "log": _log,
    "matmul": _product,
    "maximum": _maximum,
    "minimum": _minimum,
    "mul": _mul,
    "neg": _neg,
    "pow": _pow,
    "sub": _sub,
    "sum": _sum,
}
