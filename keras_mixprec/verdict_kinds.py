"""Every kind of verdict: its level, its advice and its repair.

The diagnosis, the tuner, the report and the page read this one table. This file
does not import Keras, because a log can be read without Keras.
"""

import dataclasses
import functools

# The first sentence of the advice about a layer at fault.
TO_FLOAT32 = (
    "Let this layer compute in float32: pass "
    "rules=[kmp.PrecisionRule({layer!r}), *kmp.DEFAULT_RULES] to "
    "kmp.apply_policy."
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of verdict.

    Attributes:
        name: String.
        advice: String. A template with fields for the layer and numbers.
            `diagnosis/advice.py` has other advice for special cases.
        level: String. `"bad"` (training is harmed), `"warning"` or `"info"`
            (normal).
        phrase: String that follows the name of a layer at fault, or `None` if
            the kind has no layer.
        clause: String for a kind without a layer: a clause with fields for
            numbers. `None` if the report has its own text.
        repaired_by: Tuple of the policies that repair a layer, the narrowest
            first. Empty if no policy does.
        explains: Boolean, whether the kind explains failed steps without
            blaming a layer.
        behind: Int. The rank in a list of verdicts: 0 for a cause, 1 for a
            minor cause, 2 for a consequence, 3 for a symptom. Symptoms are left
            out if there is a cause.
    """

    name: str
    advice: str
    level: str = "bad"
    phrase: str | None = None
    clause: str | None = None
    repaired_by: tuple[str, ...] = ()
    explains: bool = False
    behind: int = 0


# Creates a kind of fault that comes from float16's small range, so bfloat16 or
# float32 repairs the fault.
_of_range = functools.partial(Kind, repaired_by=("mixed_bfloat16", "float32"))

# All kinds of verdict, the most important first, and causes before effects.
_TABLE = (
    Kind(
        "weights_lost",
        "Weights are infinite or NaN, and training cannot bring them back. "
        "Restore a checkpoint from when the loss was finite.",
        explains=True,
        behind=2,
    ),
    Kind(
        "bad_data",
        "Drop or repair the rows that hold infinity or NaN: they fail in every "
        "dtype. To list all such rows of an array `{part}`: "
        "np.flatnonzero(~np.isfinite({part}).reshape(len({part}), -1)"
        ".all(axis=1)).",
        explains=True,
    ),
    Kind(
        "loss_mismatch",
        "{fix}",
        clause="the loss takes {takes}, but gets {given}",
        explains=True,
    ),
    Kind(
        "unreachable_targets",
        "{fix}",
        clause="outputs {outputs} cannot reach targets {targets}",
        explains=True,
    ),
    Kind(
        "divergence",
        "float32 fails on this batch too, so precision is not the cause. Lower "
        "the learning rate, clip gradients or check the loss.",
        explains=True,
    ),
    Kind(
        "loss_scale_ignored",
        "Multiply the whole loss by the loss scale once. Call `gradients = "
        "optimizer.unscale(gradients)` before your code uses gradients.",
        clause="gradients do not follow the loss scale",
        explains=True,
    ),
    _of_range(
        "weight_overflow",
        f"{TO_FLOAT32} bfloat16 also helps. Or scale the weight down: the cast "
        "to float16 makes numbers above 65504 infinite.",
        phrase="has weights beyond float16's range",
    ),
    _of_range(
        "weight_underflow",
        f"{TO_FLOAT32} bfloat16 also helps. Or scale the weight up: float16 "
        "rounds numbers below 3e-8 to 0.",
        level="warning",
        phrase="has weights that float16 rounds to 0",
    ),
    _of_range(
        "cast_overflow",
        f"{TO_FLOAT32} Or scale its input down to below 65504.",
        phrase="received an input beyond float16's range",
    ),
    _of_range(
        "forward_overflow",
        f"{TO_FLOAT32} Alternatively, clamp or scale down its numbers "
        "before the operation that overflows.",
        phrase="overflowed",
    ),
    _of_range(
        "backward_overflow",
        f"{TO_FLOAT32} Its gradients overflow at the loss scale that other "
        "layers need.",
        phrase="overflowed in the backward pass",
    ),
    _of_range(
        "underflow",
        f"{TO_FLOAT32} Or keep its small numbers from becoming 0: float16 "
        "rounds numbers below 3e-8 to 0. Add an epsilon of 1e-4 or more to "
        "divisors, and subtract the maximum before exp.",
        level="warning",
        phrase="underflowed",
    ),
    Kind(
        "precision_loss",
        f"{TO_FLOAT32} Its result is finite but wrong. bfloat16 has even fewer "
        "digits, so it does not help.",
        level="warning",
        phrase="lost precision",
        repaired_by=("float32",),
    ),
    Kind(
        "unsupported",
        f"{TO_FLOAT32} This backend does not support the operation in 16 bits, "
        "or refuses to mix dtypes. If dtypes mix, cast one of the two, as in "
        "keras.ops.cast(b, a.dtype).",
        phrase="does not run in 16 bits",
        repaired_by=("float32",),
    ),
    Kind(
        "not_normalized",
        "Normalize {input} with an adapted keras.layers.Normalization, or "
        "divide each column by its standard deviation.",
        level="warning",
        clause="the input {input} is not normalized: {how}",
    ),
    Kind(
        "metric_error",
        "{metric!r} is computed in {dtype}, the dtype of the model's output. "
        "This does not affect training. Cast predictions to float32 in the "
        "metric, or give the last layer dtype='float32'.",
        level="warning",
        clause="the metric {metric!r} is wrong in {dtype}",
        behind=1,
    ),
    Kind(
        "scale_too_low",
        "Gradients are 0 until the loss scale has grown. Start from 2**"
        "{needed_bits}: LossScaleOptimizer(..., initial_scale=2.0**"
        "{needed_bits}). Or train with PrecisionTuner, which raises it.",
        level="warning",
        clause="gradients underflowed at too low a loss scale",
        explains=True,
    ),
    Kind(
        "not_learning",
        "{fix}",
        clause="the model does not learn, not even in float32: {reason}",
        behind=1,
    ),
    Kind(
        "policy",
        "16-bit variables lose small updates. Use the policy 'mixed_{dtype}', "
        "which keeps variables in float32.",
        level="warning",
        clause="16-bit variables lose small updates",
        behind=1,
    ),
    Kind(
        "scale_collapsed",
        "No loss scale helps, so the scale is not the cause. Call "
        "keras_mixprec.diagnose(model, x, y) on a batch of a skipped step.",
        behind=3,
    ),
    Kind(
        "scale_search",
        "Nothing to do: the optimizer skips steps and lowers the loss scale "
        "until gradients fit.",
        level="info",
        explains=True,
        behind=3,
    ),
)
KINDS = {kind.name: kind for kind in _TABLE}

# Kinds of fault that no dtype repairs, but a return to a good state does.
LOST = frozenset({"divergence", "weights_lost"})

# Kinds of fault in the task itself, which longer training cannot repair.
OF_TASK = ("loss_mismatch", "unreachable_targets")


# Texts that name each cause of a divergence in a report, after a colon.
_CAUSES = {
    "learning_rate": "a learning rate of {learning_rate:g} is too large",
    "gradients": "gradients exploded",
    "penalty": "the penalty of {largest_of!r} is too large",
    "inputs": "inputs of {largest_of_inputs:.3g} are not normalized",
    "targets": "targets of {largest_of_targets:.3g} are not normalized",
}


def cause_in_words(numbers: dict) -> str:
    """Returns the cause of a divergence as text to append to a sentence.

    The text is empty if the cause is unknown.

    Args:
        numbers: Dict from the verdict of a divergence.

    Example:
    >>> from keras_mixprec.verdict_kinds import cause_in_words
    >>> cause_in_words({"cause": "learning_rate", "learning_rate": 10.0})
    ': a learning rate of 10 is too large'
    >>> cause_in_words({"in_layer": "norm", "operation": "1 / 0"})
    ": 1 / 0 in layer 'norm'"
    """
    place = place_of(numbers)
    if numbers.get("cause") in _CAUSES:
        text = _CAUSES[numbers["cause"]].format(**numbers)
    elif "largest_output" in numbers:
        text = f"numbers grow beyond float32 in {place}"
    elif numbers.keys() & {"in_layer", "operation"}:
        text = f"{numbers.get('operation', 'the first')} in {place}"
    else:
        return ""
    return f": {text}"


def place_of(numbers: dict) -> str:
    """Returns the place of the first non-finite number in float32, in words.

    The place is a layer or, if no layer is known, a line of the user's code.

    Args:
        numbers: As for `cause_in_words`.
    """
    if "in_layer" in numbers:
        return f"layer {numbers['in_layer']!r}"
    line = numbers.get("code", "").partition(": ")[0]
    return f"the code at {line}" if line else "the loss"


def place_in_words(kind: str, layer: str | None, direction: str | None) -> str:
    """Returns the place of a fault as text to append to its kind.

    The text is empty if neither the layer nor the direction is known.

    Args:
        kind: String. Some kinds contain the direction in their name.
        layer: String. The layer as printed, or `None`.
        direction: String. The verdict's direction, or `None`.

    Example:
    >>> from keras_mixprec.verdict_kinds import place_in_words
    >>> place_in_words("underflow", "norm", "backward")
    ' in the backward pass of norm'
    >>> place_in_words("forward_overflow", "norm", "forward")
    ' in norm'
    """
    if not direction or direction in kind:
        return f" in {layer}" if layer else ""
    phase = "update" if direction == "update" else f"{direction} pass"
    return f" in the {phase}" + (f" of {layer}" if layer else "")


def what_is_said(
    kind: str, layer: str | None, direction: str | None, advice: str
) -> tuple:
    """Returns a key that is equal for equal verdicts on different layers.

    Args:
        kind: String.
        layer: String, or `None`.
        direction: String, or `None`.
        advice: String.
    """
    return kind, direction, advice.replace(repr(layer), "")
