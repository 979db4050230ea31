"""Rules about what float32 products are computed in: TF32 or float32."""

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.flow import PASS_THROUGH_OPS, producer_of
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.analysis.lint.traced_findings import one_per_layer
from keras_mixprec.formats import format_share
from keras_mixprec.numerics.tracing import path_of
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.matmul_precision import NAMES
from keras_mixprec.policies.set_policies import reasons_of

# Of the multiply-adds, below which float32 layers take no time to save.
_SHARE_THAT_MATTERS = 0.1

# What is still the product, multiplied or with something on its diagonal.
_STILL_THE_PRODUCT = PASS_THROUGH_OPS | {"add", "sub", "mul", "div"}
_SUMMED = PASS_THROUGH_OPS | {"add", "mul"}

_FIX = "Call keras_mixprec.set_matmul_precision('float32') before training."


@rule("medium")
def products_below_float32(view):
    """Where float32 has to be exact, TF32's 11 bits are as few as float16's."""
    holds = view.matmul_precision
    if holds.products != "float32":
        yield from one_per_layer(_exact(view, holds))


def _exact(view, holds):
    bits = NAMES.get(holds.products, "fewer bits")
    for operation in _products_in_float32(view.flow):
        why = _why_exact(view.flow, operation)
        if why:
            yield _below_float32(path_of(operation), why, bits, holds)
    reasons = reasons_of(view.model) if view.low else {}
    for entry in view.entries:
        computes = entry.layer.compute_dtype == "float32" and view.share(entry)
        if computes and "precision_loss" in reasons.get(entry.path, ""):
            why = "is kept in float32 for its digits (precision_loss)"
            yield _below_float32(entry.path, why, bits, holds)


def _below_float32(path, why, bits, holds):
    return Finding(
        "medium",
        path or MODEL_PATH,
        f"Its product {why}, and float32 products keep {bits} of 24: {holds}.",
        _FIX,
        numbers={"precision": holds.products},
    )


def _products_in_float32(flow):
    for operation in flow.trace.operations:
        given = {value.dtype for value in operation.inputs[:2]}
        if operation.name == "matmul" and given == {"float32"}:
            yield operation


def _why_exact(flow, operation):
    product = operation.output
    if flow.used_by(product, {"solve"}, _STILL_THE_PRODUCT):
        return "is solved or factorized, which multiplies its errors"
    if _is_in_a_distance(flow, product):
        return "is taken off squared norms, a difference of large numbers"
    return None


def _is_in_a_distance(flow, product):
    """Whether it is the `x y` of `x**2 - 2 x y + y**2`."""
    for operation, value in flow.uses(product, PASS_THROUGH_OPS | {"mul"}):
        others = [other for other in operation.inputs if other is not value]
        if operation.name in ("sub", "add") and any(map(_is_squares, others)):
            return True
    return False


def _is_squares(value):
    """Whether squares were added up to it."""
    source = producer_of(value, _SUMMED)
    if source is None or source.name not in ("sum", "mean"):
        return False
    summed = producer_of(source.inputs[0])
    return summed is not None and (
        summed.name == "square"
        or (summed.name == "mul" and len({*map(id, summed.inputs)}) == 1)
    )


@rule("low")
def products_without_tf32(view):
    """Float32 products take several times as long as they do in TF32."""
    holds = view.matmul_precision
    if holds.products != "float32" or "tf32" not in holds.available:
        return
    wide = [e for e in view.entries if e.layer.compute_dtype == "float32"]
    share = sum(view.share(entry) for entry in wide)
    exact = any(
        _why_exact(view.flow, operation)
        for operation in _products_in_float32(view.flow)
    )
    if share < _SHARE_THAT_MATTERS or exact:
        return
    yield Finding(
        "low",
        None,
        f"{format_share(share)} of the multiply-adds are in float32, most in "
        f"{max(wide, key=view.share).path}, and products are in {holds}.",
        "Call keras_mixprec.set_matmul_precision('tf32'): inputs of products "
        "are rounded to 11 bits, sums and tensors stay in float32.",
        numbers={"share": share},
    )
