"""Rules on the operations inside of layers' own calls."""

import math

import keras

from keras_mixprec.analysis.lint import autocast_lists
from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.flow import (
    PASS_THROUGH_OPS,
    bounds_of,
    float32_range,
    format_of,
    producer_of,
)
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.analysis.lint.traced_findings import finding, one_per_layer
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.numerics.bounds import is_shifted
from keras_mixprec.numerics.tracing import path_of

# A sum of squares of numbers below this is expected to fit.
_LIKELY = 16.0

# Pooling windows, and sums, whose 16-bit result is expected not to be right.
_LARGE_WINDOW, _LARGE_SUM = 4096, 65504

# Running products of fewer numbers are not reported.
_LONG = 8


@rule("high")
def sum_of_squares(view):
    """Squares summed by hand in float16 overflow from sqrt(65504 / n) on."""
    return one_per_layer(_sums_of_squares(view.flow))


def _sums_of_squares(flow):
    for operation, dtype in flow.narrow_sums("sum"):
        if not _is_square(operation.inputs[0]):
            continue
        n = operation.reduced
        limit = math.sqrt(get_format(dtype).maximum / n)
        if limit > 1e4:  # bfloat16
            continue
        severity = "high" if limit < _LIKELY else "medium"
        if float32_range(operation.output) is not None:
            severity = "low"  # Its true size is known: `overflow_on_data`.
        yield finding(
            severity,
            operation,
            f"The squares of {n:,} numbers are added up to a {dtype} number: "
            f"that overflows from numbers of {limit:.3g} on.",
            "Cast to float32 before squaring, or compute the layer in float32.",
            summed=n,
            limit=limit,
        )


def _is_square(value):
    operation = producer_of(value, frozenset({"cast"}))
    if operation is None:
        return False
    if operation.name == "mul":
        return operation.inputs[0] is operation.inputs[1]
    return operation.name == "square"


@rule("high")
def exp_without_maximum(view):
    """Exp overflows above 11.09 in float16 unless the maximum is taken off."""
    return one_per_layer(_exponentials(view.flow))


def _exponentials(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name not in ("exp", "cosh"):
            continue
        limit, given = (
            math.log(format_of(operation).maximum),
            operation.inputs[0],
        )
        if is_shifted(given) or bounds_of(given)[1] <= limit:
            continue
        uses = [op.name for op, _ in flow.uses(operation.output, _NORMALIZING)]
        by_hand = "log" in uses or ("sum" in uses and "div" in uses)
        severity = "high" if by_hand and limit < 12 else "medium"
        if float32_range(given) is not None:
            severity = "low"
        yield finding(
            severity,
            operation,
            f"{operation.name} in {operation.output.dtype} overflows above "
            f"{limit:.4g}, and nothing keeps its argument below that"
            + (", as taking off the maximum would." if by_hand else "."),
            "Use `keras.ops.softmax`, `log_softmax` or `logsumexp`."
            if by_hand
            else "Clip its argument or compute the layer in float32.",
            limit=limit,
        )


_NORMALIZING = PASS_THROUGH_OPS | {"add", "mul", "sum", "mean", "matmul"}


@rule("high")
def log_of_probability(view):
    """A probability underflows to 0 in 16 bits, and its log is -inf."""
    return one_per_layer(_logarithms(view.flow))


def _logarithms(flow):
    for operation in flow.ops_in_16_bits:
        if operation.name != "log":
            continue
        given = operation.inputs[0]
        made = producer_of(given)
        if bounds_of(given)[0] != 0 or made is None:
            continue
        known = float32_range(given)
        if known is not None and not known.zero and known.least > 1e-6:
            continue
        if _is_probability(made):
            yield finding(
                "high",
                operation,
                f"The log of a probability in {operation.output.dtype}, which "
                "is 0 where the exact one is below 3e-8, a difference of "
                "logits of 17: log(0) is -inf.",
                "Use `keras.ops.log_softmax` or a loss with "
                "`from_logits=True`.",
            )


def _is_probability(made):
    if made.name in ("softmax", "sigmoid"):
        return True
    if made.name == "div":  # A softmax of operations.
        above = producer_of(made.inputs[0])
        return above is not None and above.name == "exp"
    if made.name == "sub" and len(made.inputs) > 1:
        above = producer_of(made.inputs[1])
        return above is not None and _is_probability(above)
    return False


@rule("high")
def large_reduction(view):
    """A sum over many numbers in 16 bits overflows or stops growing."""
    return one_per_layer(_reductions(view.flow))


def _reductions(flow):
    sums = [*flow.narrow_sums("sum"), *flow.narrow_sums("pool")]
    for operation, dtype in sums:
        n = operation.reduced
        if dtype != "float16" or n < _LARGE_WINDOW:
            continue
        if _is_square(operation.inputs[0]):
            continue
        if operation.name == "pool":
            severity = "high" if _adds_up_in_16_bits(operation) else "low"
            fix = "Use `GlobalAveragePooling`, which adds up in float32."
        else:
            severity = "high" if n >= _LARGE_SUM else "medium"
            if float32_range(operation.output) is not None:
                severity = "low"
            fix = "Use `keras.ops.mean`, which adds up in float32."
        yield finding(
            severity,
            operation,
            f"{n:,} numbers are added up to a {dtype} number: an average of "
            f"{65504 / n:.3g} is above its maximum, 65504.",
            fix,
            summed=n,
        )


def _adds_up_in_16_bits(operation):
    # Those of torch are float32 inside.
    return keras.backend.backend() != "torch"


@rule("high")
def running_product(view):
    """A running product soon vanishes in 16 bits, and must not divide."""
    return one_per_layer(_running_products(view.flow))


def _running_products(flow):
    for operation in flow.trace.operations:
        if operation.name != "cumprod" or operation.reduced < _LONG:
            continue
        divides = any(
            use.name == "div"
            and use.inputs[1] is value
            and use.output.dtype in SIXTEEN_BITS
            for use, value in flow.uses(operation.output)
        )
        if divides or operation.output.dtype in SIXTEEN_BITS:
            yield finding(
                "high" if divides else "medium",
                operation,
                f"A running product of {operation.reduced:,} numbers"
                + (
                    " divides in 16 bits: by 0 once it has vanished."
                    if divides
                    else f" is in {operation.output.dtype}."
                ),
                "Add up logarithms in float32, or compute the layer in "
                "float32.",
                length=operation.reduced,
            )


@rule("high")
def mixed_dtypes(view):
    """The layers' dtypes do not mix: what works in float32 raises."""
    error = view.flow.trace.error
    if error is None or view.x is not None:  # Which `wrong_on_the_data` finds.
        return
    text = " ".join(str(error).split())
    yield Finding(
        "high",
        None,
        f"A call raises {type(error).__name__} in these dtypes, and not in "
        f"float32: {text[:300]}",
        "Cast what is computed by hand to `self.compute_dtype`.",
        numbers={"error": type(error).__name__},
    )


@rule("medium")
def hard_coded_float16(view):
    """A layer casts to 16 bits by itself, in float32 as well."""
    return one_per_layer(_hard_coded(view.flow))


def _hard_coded(flow):
    for operation in flow.ops_in_16_bits:
        reference = operation.output.reference
        if operation.name == "cast" or reference is None:
            continue
        if reference.dtype in SIXTEEN_BITS:
            yield finding(
                "medium",
                operation,
                f"`{operation.name}` is computed in {reference.dtype} whatever "
                "dtype the layer has: no policy can demote it.",
                "Cast to `self.compute_dtype` or to the dtype of an input.",
                dtype=reference.dtype,
            )


@rule("low")
def kept_in_float32_elsewhere(view):
    """Operations that autocast and the graph rewrite compute in float32."""
    layers = {e.path: e.layer for e in view.entries}
    for path, layer in layers.items():
        if type(layer).__module__.startswith(("keras.", "keras_hub.")):
            continue
        names = {
            op.name for op in view.flow.ops_in_16_bits if path_of(op) == path
        } & autocast_lists.TORCH
        if not names:
            continue
        both = names & autocast_lists.TENSORFLOW
        yield Finding(
            "low",
            path,
            f"{', '.join(sorted(names))} in 16 bits: torch's autocast computes "
            "these in float32"
            + (
                f", TensorFlow's graph rewrite {', '.join(sorted(both))} too."
                if both
                else "."
            ),
            "Nothing if their range is known, else cast to float32 for them.",
            numbers={"operations": sorted(names)},
        )
