"""Rules about what float32 products are computed in: TF32 or float32."""

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.formats import format_share
from keras_mixprec.policies.matmul_precision import NAMES
from keras_mixprec.policies.set_policies import reasons_of

# Of the multiply-adds, below which float32 layers take no time to save.
_SHARE_THAT_MATTERS = 0.1


@rule("medium")
def products_below_float32(view):
    """Where float32 has to be exact, TF32's 11 bits are as few as float16's."""
    holds = view.matmul_precision
    if holds.products == "float32":
        return
    bits = NAMES.get(holds.products, "fewer bits")
    for entry in _kept_for_digits(view):
        yield Finding(
            "medium",
            entry.path,
            "It is kept in float32 for its digits (precision_loss), and "
            f"float32 products keep {bits} of 24: {holds}.",
            "Call keras_mixprec.set_matmul_precision('float32') before "
            "training.",
            numbers={"precision": holds.products},
        )


def _kept_for_digits(view):
    """The layers with products that 16 bits were not enough for."""
    reasons = reasons_of(view.model)
    return [
        entry
        for entry in _in_float32(view)
        if view.share(entry) and "precision_loss" in reasons.get(entry.path, "")
    ]


def _in_float32(view):
    return [e for e in view.entries if e.layer.compute_dtype == "float32"]


@rule("low")
def products_without_tf32(view):
    """Float32 products take several times as long as they do in TF32."""
    holds = view.matmul_precision
    if holds.products != "float32" or "tf32" not in holds.available:
        return
    wide = _in_float32(view)
    share = sum(view.share(entry) for entry in wide)
    if share < _SHARE_THAT_MATTERS or _kept_for_digits(view):
        return
    yield Finding(
        "low",
        None,
        f"{format_share(share)} of the multiply-adds are in float32, most in "
        f"{max(wide, key=view.share).path}, and products are in {holds}.",
        "Call keras_mixprec.set_matmul_precision('tf32'), unless a layer "
        "needs the digits of its products: their inputs are rounded to 11 "
        "bits, sums and tensors stay in float32.",
        numbers={"share": share},
    )
