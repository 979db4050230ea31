"""Every kind of verdict: how grave it is, what to do, what repairs it.

The one table that the diagnosis, the tuner, the report and the page read. It
imports nothing, since those who read a log have no Keras.
"""

import dataclasses

TO_FLOAT32 = "Let it compute in float32: PrecisionRule({layer!r})"

# Of more range, for what is too large or too small, and of more digits.
_MORE_RANGE = ("mixed_bfloat16", "float32")
_MORE_DIGITS = ("float32",)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of verdict.

    Attributes:
        name: String.
        advice: String. What to do, a sentence with the layer and numbers to be
            filled in; `diagnosis/advice.py` has others for special cases.
        level: String. `"bad"` (training is harmed), `"warning"` or `"info"`
            (normal).
        phrase: String. What a layer at fault does, to follow its name; `None`
            of a kind that is of no layer.
        repaired_by: Tuple of the policies that repair a layer, the narrowest
            first; empty where no policy does.
        explains: Boolean. Whether it says why steps are bad although no layer
            is at fault.
        behind: Int. 0 of a cause, 1 of one that others come before, 2 of what
            something else has brought about.
    """

    name: str
    advice: str
    level: str = "bad"
    phrase: str | None = None
    repaired_by: tuple[str, ...] = ()
    explains: bool = False
    behind: int = 0


# The most important first, causes before effects.
_TABLE = (
    Kind(
        "weights_lost",
        "Restore a checkpoint from before: training cannot bring back weights "
        "that are not finite.",
        explains=True,
        behind=2,
    ),
    Kind(
        "bad_data",
        "Drop or repair these rows, no precision helps. All of them in an "
        "array `{part}` are np.flatnonzero(~np.isfinite({part}).reshape("
        "len({part}), -1).all(axis=1)).",
        explains=True,
    ),
    Kind(
        "divergence",
        "float32 fails on this batch as well, so it is no matter of precision: "
        "lower the learning rate, clip gradients or look at the loss.",
        explains=True,
    ),
    Kind(
        "weight_overflow",
        f"{TO_FLOAT32}, or bfloat16, or scale the weight down: float16 ends at "
        "65504, and the cast makes what is beyond infinite.",
        phrase="has weights beyond float16",
        repaired_by=_MORE_RANGE,
    ),
    Kind(
        "weight_underflow",
        f"{TO_FLOAT32}, or bfloat16, or scale the weight up: float16 makes 0 "
        "of what is below 3e-8.",
        level="warning",
        phrase="has weights that float16 makes 0",
        repaired_by=_MORE_RANGE,
    ),
    Kind(
        "cast_overflow",
        f"{TO_FLOAT32}, or scale its input down to below 65504.",
        phrase="received an input beyond float16",
        repaired_by=_MORE_RANGE,
    ),
    Kind(
        "forward_overflow",
        f"{TO_FLOAT32}, or clamp or scale down before the sum, square or "
        "product that overflows.",
        phrase="overflowed",
        repaired_by=_MORE_RANGE,
    ),
    Kind(
        "backward_overflow",
        f"{TO_FLOAT32}: its gradients overflow at a loss scale that the other "
        "layers need.",
        phrase="overflowed in the backward pass",
        repaired_by=_MORE_RANGE,
    ),
    Kind(
        "underflow",
        f"{TO_FLOAT32}, or keep its small numbers, such as an epsilon, above "
        "6e-8.",
        level="warning",
        phrase="underflowed",
        repaired_by=_MORE_RANGE,
    ),
    Kind(
        "precision_loss",
        f"{TO_FLOAT32} and not bfloat16, which has still fewer digits: it is "
        "finite but wrong.",
        level="warning",
        phrase="lost precision",
        repaired_by=_MORE_DIGITS,
    ),
    Kind(
        "unsupported",
        f"{TO_FLOAT32}: this backend refuses the operation in 16 bits, or to "
        "mix dtypes; for a mix, cast one of them there, as in "
        "keras.ops.cast(b, a.dtype).",
        phrase="does not run in 16 bits",
        repaired_by=_MORE_DIGITS,
    ),
    Kind(
        "scale_too_low",
        "Start from a loss scale of 2**{needed_bits}, by "
        "LossScaleOptimizer(..., initial_scale=2.0**{needed_bits}), or train "
        "with PrecisionTuner, which raises it: until then gradients are zero.",
        level="warning",
        explains=True,
    ),
    Kind(
        "policy",
        "Use the policy 'mixed_{dtype}', which keeps variables in float32: "
        "16-bit variables lose small updates.",
        level="warning",
        behind=1,
    ),
    Kind(
        "scale_collapsed",
        "No loss scale helps, so its cause is elsewhere: call "
        "keras_mixprec.diagnose(model, x, y) on a batch whose step is skipped.",
        behind=2,
    ),
    Kind(
        "scale_search",
        "Nothing: the loss scale is on its way down to where gradients fit, "
        "and skips steps until then.",
        level="info",
        explains=True,
        behind=2,
    ),
)
KINDS = {kind.name: kind for kind in _TABLE}


def what_is_said(
    kind: str, layer: str | None, direction: str | None, advice: str
) -> tuple:
    """Returns what verdicts that say the same of several layers have in common.

    Args:
        kind: String.
        layer: String, or `None`.
        direction: String, or `None`.
        advice: String.
    """
    return kind, direction, advice.replace(repr(layer), "")
