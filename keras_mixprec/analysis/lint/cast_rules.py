"""Rules about which dtype each layer computes in, and casts between them."""

import keras

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.formats import SIXTEEN_BITS, format_share
from keras_mixprec.keras_internals import only_runs_graph, sublayers
from keras_mixprec.policies.casts import (
    WORTH_A_CAST,
    cast_elements,
    isolated_layers,
)
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.names import is_fixed

# Of the multiply-adds in 16 bits, below which there is little to gain.
_LITTLE = 0.5


@rule("low")
def no_16_bit_layers(view):
    """Without a layer in 16 bits there is nothing to gain, nor to check."""
    if not view.low:
        data = "" if view.x is None else ", so the data were only run through"
        yield Finding(
            "low",
            None,
            f"No layer computes in float16 or bfloat16{data}.",
            "Check it as it would be in 16 bits: "
            "lint(model, policy='mixed_float16').",
        )


@rule("low")
def little_work_in_16_bits(view):
    """Time is saved only in what computes in 16 bits."""
    share = sum(view.share(entry) for entry in view.low)
    if view.low and any(view.multiply_adds.values()) and share < _LITTLE:
        wide = [e for e in view.entries if e.layer.compute_dtype == "float32"]
        largest = max(wide, key=view.share)
        yield Finding(
            "low",
            None,
            f"{format_share(share)} of the multiply-adds are in 16 bits; the "
            f"most in float32, {format_share(view.share(largest))}, are in "
            f"{largest.path!r}.",
            "Let apply_policy(model, ...) set every layer, and see why the "
            "largest is in float32: precision_summary(model).",
            numbers={"share": share, "largest": largest.path},
        )


@rule("low")
def casts_cost_more(view):
    """A cast of a number takes as long as 400 multiply-adds save."""
    casts = cast_elements(view.model)
    elements = sum(casts.values())
    done = sum(view.multiply_adds[entry.path] or 0 for entry in view.low)
    known = any(view.multiply_adds.values())
    if known and elements * WORTH_A_CAST > done > 0:
        yield Finding(
            "low",
            None,
            f"Casts of {elements:,} numbers of each sample, at the inputs of "
            f"{', '.join(list(casts)[:4])}, take as long as {WORTH_A_CAST} "
            f"multiply-adds each; {done:,} multiply-adds are in 16 bits.",
            "Put neighbouring layers into one dtype, or train in float32.",
            numbers={"layers": len(casts), "elements": elements}
            | {"multiply_adds": done},
        )


@rule("low")
def dtype_bounces(view):
    """Small 16-bit layers between float32 layers save less than their casts."""
    isolated = {id(layer) for layer in isolated_layers(view.model)}
    for entry in view.low:
        if id(entry.layer) in isolated:
            yield Finding(
                "low",
                entry.path,
                f"It computes in {entry.layer.compute_dtype} between float32 "
                "layers: its casts take longer than 16 bits save in it.",
                "Let this layer compute in float32.",
                to_float32(entry.path, "isolated between float32 layers"),
            )


@rule("medium")
def wrapper_dtype_ignored(view):
    """Setting the dtype of a layer does not reach the layers inside it."""
    for entry in view.entries:
        holder, inside = entry.layer, list(sublayers(entry.layer))
        if not inside or entry.path == MODEL_PATH or _only_holds(holder):
            continue
        low = [x for x in inside if x.compute_dtype in SIXTEEN_BITS]
        narrow = [x for x in low if not is_fixed(x)]
        if holder.compute_dtype == "float32" and len(narrow) == len(inside):
            yield Finding(
                "medium",
                entry.path,
                f"It is set to float32, but the {len(narrow)} layers in it, "
                f"{narrow[0].name!r} first, compute in "
                f"{narrow[0].compute_dtype}.",
                f"Hand its dtype on, or PrecisionRule({entry.path!r}), which "
                "reaches what is inside.",
                to_float32(entry.path, "set to float32, with all inside it"),
                numbers={"layers": len(narrow)},
            )


def _only_holds(layer):
    """Whether it is a model of layers, whose own dtype means nothing."""
    return only_runs_graph(layer) or isinstance(layer, keras.Sequential)
