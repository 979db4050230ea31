"""Rules on the numbers that operations make of given samples, in float32."""

from keras_mixprec.analysis.lint.flow import (
    PASS_THROUGH_OPS,
    constant_in_code,
    float32_range,
    format_of,
)
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.analysis.lint.traced_findings import finding, one_per_layer
from keras_mixprec.backend.operations import VANISHING
from keras_mixprec.formats import SIXTEEN_BITS, format_share
from keras_mixprec.numerics.bounds import is_shifted

# A constant as large as that is a mask, not a number that is computed with.
_MASK = 1e4

# Rounding that is more than this share of a standard deviation is a loss.
_LOST = 0.1

# A difference that is a smaller share of what it is of has lost 3 bits.
_CANCELLED = 0.125

# What a mask is still in after them.
_MASKED = PASS_THROUGH_OPS | {
    "add",
    "sub",
    "select",
    "mul",
    "maximum",
    "concat",
}

_DIVIDING = {"div": 1, "log": 0, "reciprocal": 0, "rsqrt": 0}


@rule("high")
def overflow_on_data(view):
    """What a layer computes of the samples is above the format's maximum."""
    return one_per_layer(_overflows(view.flow))


def _overflows(flow):
    masked = _masked(flow)
    for operation in flow.ops_in_16_bits:
        maximum = format_of(operation).maximum
        for value in operation.outputs:
            found = float32_range(value)
            # A fused attention hands on float32 sums beside its outputs.
            narrow = value.dtype in SIXTEEN_BITS
            if found is None or id(value) in masked or not narrow:
                continue
            if found.largest > maximum:
                yield finding(
                    "high",
                    operation,
                    f"`{operation.name}` makes {found.largest:.3g} of these "
                    f"samples, above the maximum of {value.dtype}, "
                    f"{maximum:g}.",
                    "Compute the layer in float32, or scale what it is given.",
                    largest=found.largest,
                    maximum=maximum,
                )


def _masked(flow):
    """Ids of the values that a large constant is in, such as a mask."""
    known = set()
    for operation in flow.trace.operations:
        if operation.name not in _MASKED:
            continue
        numbers = map(constant_in_code, operation.inputs)
        if any(n is not None and abs(n) >= _MASK for n in numbers) or any(
            id(value) in known for value in operation.inputs
        ):
            known.update(map(id, operation.outputs))
    return known


@rule("high")
def underflow_on_data(view):
    """A number that is not 0 in float32 is 0 in 16 bits where it divides."""
    return one_per_layer(_underflows(view.flow))


def _underflows(flow):
    for operation in flow.ops_in_16_bits:
        place = _DIVIDING.get(operation.name)
        if place is None or format_of(operation).maximum > 1e5:
            continue
        given = operation.inputs[place]
        found = float32_range(given)
        if found is None or found.zero or found.least >= VANISHING:
            continue
        yield finding(
            "high",
            operation,
            f"`{operation.name}` is given {found.least:.2g} for these samples, "
            f"which is 0 in {operation.output.dtype}.",
            "Compute the layer in float32, or add an epsilon of at least 1e-7.",
            least=found.least,
        )
    yield from _squares(flow)


def _squares(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name not in ("square", "mul"):
            continue
        same = len(operation.inputs) < 2 or (
            operation.inputs[0] is operation.inputs[1]
        )
        found = float32_range(operation.output)
        if not same or found is None or found.vanishing < 0.5:
            continue
        if format_of(operation).maximum > 1e5:
            continue
        through = PASS_THROUGH_OPS | {"sum", "mean", "sqrt", "add", "maximum"}
        if flow.used_by(operation.output, set(_DIVIDING), through):
            yield finding(
                "high",
                operation,
                f"{format_share(found.vanishing)} of the squares of these "
                "samples are 0 in float16, and their sum divides.",
                "Compute the layer in float32, or scale what it is given.",
                vanishing=found.vanishing,
            )


@rule("high")
def cancellation_on_data(view):
    """A difference is smaller than the rounding of what it is of."""
    return one_per_layer(_cancellations(view.flow))


def _cancellations(flow):
    masked = _masked(flow)
    for operation in flow.ops_in_16_bits:
        if operation.name != "sub" or is_shifted(operation.output):
            continue
        if any(id(value) in masked for value in operation.inputs):
            continue
        parts = [
            float32_range(value)
            for value in operation.inputs
            if constant_in_code(value) is None and _is_rounded(value)
        ]
        found = float32_range(operation.output)
        if found is None or None in parts or not parts:
            continue
        largest = max(part.largest for part in parts)
        if found.largest > _CANCELLED * largest:
            continue
        error = largest * format_of(operation).epsilon / 4
        if found.deviation and error > _LOST * found.deviation:
            yield finding(
                "high",
                operation,
                f"Numbers of {largest:.3g} are rounded by about {error:.2g}, "
                f"and their difference varies by {found.deviation:.2g}.",
                "Compute the layer in float32, or subtract before squaring.",
                rounding=error,
                deviation=found.deviation,
            )


def _is_rounded(value):
    """Whether a value was computed in 16 bits, or cast to them."""
    return value.source is not None


@rule("high")
def rounded_inputs(view):
    """A cast to 16 bits rounds by more than what the numbers differ by."""
    return one_per_layer(_rounded(view.flow))


def _rounded(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name != "cast":
            continue
        found = float32_range(operation.inputs[0])
        if found is None or operation.inputs[0].source is not None:
            continue
        epsilon = format_of(operation).epsilon
        error = found.largest * epsilon / 2
        if found.unit > error:  # Such as integers up to 2048: exact.
            continue
        if found.deviation and error > _LOST * found.deviation:
            yield finding(
                "high",
                operation,
                f"Numbers of {found.largest:,.6g} are cast to "
                f"{operation.output.dtype}, whose spacing there is "
                f"{2 * error:.2g}, and differ by {found.deviation:.2g}.",
                "Take off the mean in float32 or before training.",
                spacing=2 * error,
                deviation=found.deviation,
            )


@rule("high")
def angles_on_data(view):
    """Sines of angles that 16 bits space further apart than a radian."""
    return one_per_layer(_angles(view.flow))


def _angles(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name not in ("sin", "cos"):
            continue
        found = float32_range(operation.inputs[0])
        spacing = found.largest * format_of(operation).epsilon if found else 0
        if spacing > 1:
            yield finding(
                "high",
                operation,
                f"`{operation.name}` of angles of up to {found.largest:.4g}, "
                f"which are {spacing:.2g} apart in {operation.output.dtype}.",
                "Compute angles in float32, and cast their sines.",
                spacing=spacing,
            )
