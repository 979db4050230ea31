"""Rules on constants and integers that 16 bits cannot hold."""

import math

from keras_mixprec.analysis.lint.flow import (
    PASS_THROUGH_OPS,
    bounds_of,
    constant_in_code,
    float32_range,
    format_of,
    may_be_zero,
    producer_of,
    rounded_to,
)
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.analysis.lint.traced_findings import finding, one_per_layer
from keras_mixprec.formats import SIXTEEN_BITS, get_format

# Where a 0 that an epsilon was to keep away does harm.
_OF_ZERO = {
    "log": "log(0) is -inf",
    "div": "it divides by 0",
    "reciprocal": "it divides by 0",
    "rsqrt": "1/sqrt(0) is infinite",
    "sqrt": "the slope of sqrt at 0 is infinite",
}

# What makes infinities of zeros.
_INFINITE = {"div", "reciprocal", "rsqrt"}

_SOFTMAXES = frozenset({"exp", "log_softmax", "max", "softmax"})
_MASKING = PASS_THROUGH_OPS | {
    "add",
    "sub",
    "select",
    "maximum",
    "minimum",
    "mul",
}


@rule("high")
def vanishing_constant(view):
    """A constant below the format's smallest number is 0 where it is added."""
    return one_per_layer(_vanishing(view.flow))


def _vanishing(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name not in ("add", "maximum", "clip"):
            continue
        smallest = format_of(operation).smallest_subnormal
        for value in operation.inputs:
            number = constant_in_code(value)
            if number and abs(number) <= smallest / 2:
                yield _vanished(flow, operation, value, number)


def _vanished(flow, operation, value, number):
    dtype = operation.output.dtype
    other = [v for v in operation.inputs if v is not value][0]
    harm = _harm(flow, operation.output)
    severity = "low"
    if harm and may_be_zero(other):
        severity = (
            "high" if harm != "sqrt" or _is_exact_zero(other) else "medium"
        )
    elif harm and float32_range(other) is not None:
        severity = "medium"  # Other data may have a 0.
        if bounds_of(other)[0] > 0:
            severity = "low"
    smallest = get_format(dtype).smallest_subnormal
    return finding(
        severity,
        operation,
        f"{number:g} is 0 in {dtype}, whose smallest number is {smallest:.2g}"
        + (f": {_OF_ZERO[harm]} where the rest is 0." if harm else "."),
        f"Add at least {_round_up(smallest)} or compute the layer in float32.",
        constant=number,
        dtype=dtype,
    )


def _harm(flow, value):
    """The most harmful use of a value that may be 0, `None` if harmless."""
    uses = [
        (op, given)
        for op, given in flow.uses(
            value, PASS_THROUGH_OPS | {"sqrt", "mul", "sum"}
        )
        if op.name in _OF_ZERO
        and (op.name != "div" or (op.inputs[1:] and op.inputs[1] is given))
    ]
    names = [op.name for op, _ in uses]
    return min(names, key=list(_OF_ZERO).index, default=None)


def _is_exact_zero(value):
    """Whether it is of differences between all pairs, each of one to itself."""
    operation = producer_of(
        value, PASS_THROUGH_OPS | {"sum", "square", "abs", "mul", "mean"}
    )
    if operation is None or operation.name != "sub":
        return False
    first, second = operation.inputs[:2]
    through = frozenset({"slice", "cast"})
    made = producer_of(first, through)
    return first is second or (
        made is not None and made is producer_of(second, through)
    )


def _round_up(number):
    exponent = math.ceil(math.log10(number))
    return f"1e{exponent:d}"


@rule("high")
def overflowing_constant(view):
    """A constant above the format's maximum is infinite in 16 bits."""
    return one_per_layer(_overflowing(view.flow))


def _overflowing(flow):
    for operation in flow.ops_in_16_bits:
        maximum = format_of(operation).maximum
        for place, value in enumerate(operation.inputs):
            number = constant_in_code(value)
            if operation.name == "cast" or number is None:
                continue
            if maximum < abs(number) < math.inf:
                yield _overflowed(flow, operation, place, value, number)


def _overflowed(flow, operation, place, value, number):
    infinite = value.dtype in SIXTEEN_BITS
    severity, effect = _effect(flow, operation, place, number, infinite)
    dtype, maximum = operation.output.dtype, format_of(operation).maximum
    return finding(
        severity,
        operation,
        f"{number:g} is above the maximum of {dtype}, {maximum:g}: {effect}.",
        "Use a smaller constant or compute the layer in float32."
        if severity == "low" or number > 0
        else f"Use {_mask_for(maximum):g} for a mask, or "
        "`keras.layers.Softmax` with `mask`.",
        constant=number,
        dtype=dtype,
    )


def _mask_for(maximum):
    return -3e4 if maximum < 1e5 else -1e9


def _effect(flow, operation, place, number, infinite):
    others = [v for i, v in enumerate(operation.inputs) if i != place]
    if operation.name == "mul" and others:
        low, high = bounds_of(others[0])
        if infinite and low <= 0 <= high:
            return "high", "0 times infinity is NaN"
        found = float32_range(operation.output)
        maximum = format_of(operation).maximum
        if found is not None and found.largest < maximum:
            return "low", "the product fits on these data"
        if number < 0 and flow.used_by(operation.output, _SOFTMAXES, _MASKING):
            return "medium", "rows that are masked as a whole become NaN"
        return "high", "the product is infinite"
    if operation.name == "div" and place == 1:
        return "high", "all quotients are 0"
    if operation.name in ("maximum", "minimum", "clip", "compare"):
        made = [producer_of(value) for value in others]
        infinite = [
            op for op in made if op is not None and op.name in _INFINITE
        ]
        if infinite and operation.name != "compare":
            given = infinite[0].inputs[-1]
            severity = "high" if may_be_zero(given) else "low"
            return severity, f"it does not limit the `{infinite[0].name}` of 0"
        return "low", "it limits nothing"
    if number < 0 or operation.name == "select":
        if flow.used_by(operation.output, _SOFTMAXES, _MASKING):
            return "medium", "rows that are masked as a whole become NaN"
        return "medium", "what it is given becomes -inf"
    return "high", "the sum is infinite"


@rule("medium")
def masks_at_limit(view):
    """Two masks at the format's limit add up to -inf, a whole row to NaN."""
    return one_per_layer(_stacked_masks(view.flow))


def _stacked_masks(flow):
    for operation in flow.trace.operations:
        if operation.name not in ("softmax", "max", "log_softmax"):
            continue
        masks = list(_limits(operation.inputs[0], 12))
        if len(masks) > 1:
            dtype, _ = masks[0]
            yield finding(
                "medium",
                operation,
                f"{len(masks)} masks of about {masks[0][1]:g}, the limit of "
                f"{dtype}, are added: where both hold the sum is -inf, and a "
                "softmax of a whole row of them is NaN.",
                "Combine the masks before one of them is added, or use half "
                "of the limit.",
                masks=len(masks),
            )


def _limits(value, depth):
    """Yields the constants at the limit that are added on the way to it."""
    operation = value.source
    if operation is None or depth == 0:
        return
    if operation.name in ("add", "sub", "cast"):
        for given in operation.inputs:
            yield from _limits(given, depth - 1)
    if operation.name not in ("add", "sub", "mul", "select"):
        return
    for given in operation.inputs:
        number, dtype = constant_in_code(given), operation.output.dtype
        if number is not None and dtype in SIXTEEN_BITS:
            maximum = get_format(dtype).maximum
            if maximum / 2 < abs(number) <= maximum * 1.001:
                yield dtype, number


@rule("high")
def integers_in_16_bits(view):
    """Integers are rounded above 2048 in float16 and 256 in bfloat16."""
    return one_per_layer(_integers(view.flow))


def _integers(flow):
    for operation in flow.ops_in_16_bits:
        dtype = operation.output.dtype
        exact = get_format(dtype).exact_integers
        largest = 0.0
        if operation.name == "arange":
            largest = bounds_of(operation.output)[1]
        elif operation.name == "cast" and "int" in operation.inputs[0].dtype:
            given = operation.inputs[0]
            found = float32_range(given)
            largest = found.largest if found else bounds_of(given)[1]
        elif operation.name == "cumsum":
            low, high = bounds_of(operation.inputs[0])
            counts = (low, high) == (0.0, 1.0)
            largest = operation.reduced if counts else 0.0
        if exact < largest < math.inf:
            yield finding(
                "high",
                operation,
                f"Integers of up to {largest:,.0f} are {dtype} here, which has "
                f"every integer only up to {exact:,.0f}.",
                "Keep them as integers or in float32 until they are scaled.",
                largest=largest,
                dtype=dtype,
            )


@rule("high")
def index_in_16_bits(view):
    """Ids that were 16-bit floats no longer name every row of a table."""
    return one_per_layer(_indices(view.flow))


def _indices(flow):
    through = PASS_THROUGH_OPS | {"add", "select", "maximum", "minimum", "clip"}
    for operation in flow.trace.operations:
        if operation.name != "cast" or "int" not in operation.output.dtype:
            continue
        dtype = operation.inputs[0].dtype
        if dtype not in SIXTEEN_BITS:
            continue
        exact = get_format(dtype).exact_integers
        for use, _ in flow.uses(operation.output, through):
            rows = (use.inputs[0].shape or (0,))[0] if use.inputs else 0
            if use.name == "gather" and (rows or 0) > exact:
                yield finding(
                    "high",
                    operation,
                    f"Ids of a table of {rows:,} rows are {dtype} at first, "
                    f"which has every integer only up to {exact:,.0f}.",
                    "Pass ids as integers, also from layer to layer.",
                    rows=rows,
                    dtype=dtype,
                )


@rule("high")
def constant_rounded_to_one(view):
    """A factor or limit just below 1 is 1 in 16 bits, where slopes end."""
    return one_per_layer(_rounded_to_one(view.flow))


def _rounded_to_one(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name not in ("mul", "minimum", "clip"):
            continue
        dtype = operation.output.dtype
        for value in operation.inputs:
            number = constant_in_code(value)
            if number is None or not 0.5 < abs(number) < 1:
                continue
            if abs(rounded_to(number, dtype)) != 1:
                continue
            if flow.used_by(operation.output, {"acos", "asin", "atanh"}):
                harm = "its slope is infinite at 1"
            elif operation.name != "mul" and _log_of_rest(flow, operation):
                harm = "log(1 - 1) is -inf"
            else:
                continue
            yield finding(
                "high",
                operation,
                f"{number:.9g} is 1 in {dtype}: {harm}.",
                f"Stay {get_format(dtype).epsilon:.1g} below 1 or compute the "
                "layer in float32.",
                constant=number,
                dtype=dtype,
            )


def _log_of_rest(flow, operation):
    return any(
        op.name == "sub" and flow.used_by(op.output, {"log"})
        for op, _ in flow.uses(operation.output)
    )
