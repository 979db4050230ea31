"""Advice for each kind of fault."""

import math
import re
import types

from keras_mixprec.diagnosis.thresholds import BITS_ABOVE
from keras_mixprec.loss_scaling.stages import scaling_call
from keras_mixprec.policies.layers import (
    MODEL_PATH,
    has_own_loss,
    has_own_step,
)
from keras_mixprec.verdict_kinds import KINDS, TO_FLOAT32, place_of

_EPSILON = (
    " The optimizer's `{name}` of {value:g} rounds to 0 in the variables' "
    "dtype, so it divides 0 by 0 and weights become NaN. Set it to 1e-4 or "
    "keep variables in float32."
)
_BETA = (
    " The optimizer's `{name}` of {value:g} rounds to 1 in the variables' "
    "dtype, so weights stop changing or become NaN. Set it to 0.99 or keep "
    "variables in float32."
)

# The advice for `predict` if float32 gives NaN.
FLOAT32_FAILS_TOO = (
    "float32 gives NaN on this batch too, so precision is not the cause. Check "
    "the inputs, the weights and the masks."
)

_OURS = (
    "Keras' own optimizer lacks that method; "
    "`keras_mixprec.LossScaleOptimizer` has it."
)

_OUTSIDE = (
    "the model's `call`, `compute_loss`, `train_step` or `predict_step`, or "
    "the code that calls the model"
)

# Advice for special cases of a fault, which the evidence distinguishes.
_CASES = {
    "diverged": "{evidence}, so precision is not the cause. Lower the learning "
    "rate{rate}, or clip gradients.",
    "large_input": "{input} ranges from {smallest_input:.6g} to "
    "{largest_input:.6g}, which is too large even for float32. Normalize it "
    "first, for example with keras.layers.Normalization.",
    "input": " Its input {input} ranges from {smallest_input:.6g} to "
    "{largest_input:.6g}. Normalize it first, for example with "
    "keras.layers.Normalization.",
    "grows": "Numbers grow from {largest_input:.3g} to {largest_output:.3g} in "
    "layer {in_layer!r}, and then overflow float32. Start with smaller "
    "weights, or normalize between steps.",
    "between_gradients": "The loss is finite in float32, but `train_step` "
    "passes non-finite gradients to the optimizer. Check the terms that it "
    "adds, such as gradients from an earlier step, or the norm of a zero "
    "weight.",
    "loss_grew": "The loss was {loss_at_first:.3g} when training began. On "
    "the batch of this step it is {loss_in_float32:.3g} even in float32",
    "weights_grew": "The largest weight grew from "
    "{largest_weight_at_first:.3g} when training began to {largest_weight:.3g}",
    "learning_rate": "Set the learning rate to {holds:g}: {learning_rate:g} "
    "is too large.",
    "gradients": "Set global_clipnorm={clip:.1f} on the optimizer: gradients "
    "explode, and a smaller learning rate does not help.",
    "penalty": "Reduce the regularization factor of layer {largest_of!r}: the "
    "penalty is larger than the rest of the loss.",
    "inputs": "Normalize the inputs, for example with "
    "keras.layers.Normalization: they reach {largest_of_inputs:.3g}.",
    "targets": "Divide the targets by their standard deviation: they reach "
    "{largest_of_targets:.3g}.",
    "in_training": KINDS["forward_overflow"].advice
    + " A smaller loss scale cannot help.",
    "follows": f"{TO_FLOAT32} The code that uses its output, in {{later_code}},"
    " fails in 16 bits.",
    "own_backward": f"{TO_FLOAT32} Its backward pass overflows although the "
    "incoming gradients fit, for example in a division by small numbers. A "
    "smaller loss scale may not help.",
    "steep": f"{TO_FLOAT32} Its incoming gradient overflows even at a loss "
    "scale of 1. Smaller targets, or a loss divided by a constant, may help.",
    "zero_backward": f"{TO_FLOAT32} Its backward pass divides by a number that "
    "becomes 0 in float16. Alternatively, keep its small numbers, such as an "
    "epsilon, above 6e-8.",
    "outside": f"The fault is in code outside layers: {_OUTSIDE}. Cast the "
    "tensors in that code: keras.ops.cast(x, 'float32').",
    "not_written": "Values that the layer assigns to {not_written!r} in its "
    "call are lost: Keras on torch writes them to a 16-bit copy. Create the "
    "variable with add_weight(..., autocast=False), or let the layer compute "
    "in float32: kmp.PrecisionRule({layer!r}).",
    "mixed_outside": f"Code outside layers ({_OUTSIDE}) mixes dtypes, or "
    "uses an operation that this backend does not support in 16 bits. Cast "
    "the tensors in that code: keras.ops.cast(x, 'float32').",
    "between": "The fault is in {own_call}, after layer {layer!r}. Cast the "
    "tensors there with keras.ops.cast(x, 'float32'), or let the layer "
    "compute in float32: kmp.PrecisionRule({layer!r}).",
    "not_held": "Layer {not_held!r} runs in {dtype} but is not part of the "
    "model. Create it with dtype='float32', or make it an attribute of the "
    "model, so that policies, plans and diagnoses include it.",
    "narrow_loss": "Loss {narrow_loss!r} computes in {dtype}. Call "
    "keras.config.set_floatx('float32') before `compile`, or create the loss "
    "with dtype='float32'.",
    "fell": "Skipped steps have lowered the loss scale. It grows back slowly "
    "after you repair their cause. PrecisionTuner would set it to "
    "2**{needed_bits} at once.",
    "vanishes": f"{TO_FLOAT32} Its gradients underflow at the loss scale that "
    "other layers need.",
    "unscaled": "Its gradients underflow because nothing scales the loss "
    "enough. Call kmp.ensure_loss_scaling(model).",
    "unscaled_step": "Its gradients underflow because nothing scales the loss "
    "enough. Train with kmp.LossScaleOptimizer and call "
    "`loss = optimizer.{scaling}` in `train_step`.",
    "integers": "Its input holds whole numbers that the cast to 16 bits "
    "rounds. If they are ids, such as tokens, use keras.Input(..., "
    "dtype='int32'). Otherwise let the layer compute in float32: "
    "kmp.PrecisionRule({layer!r}).",
    "above": "Its gradients underflow at this loss scale. Raise the scale to "
    "2**{advised_bits}. Raise `max_scale` too if it is lower.",
    "never_scaled": "The loss is never multiplied by the loss scale, so small "
    "gradients underflow to 0 in float16. Call "
    "`loss = optimizer.{scaling}` in `train_step` before it computes "
    "gradients.",
    "scaled_twice": "Your code multiplies gradients by the loss scale more "
    "often than it divides them. Scale the loss once, with "
    "`optimizer.{scaling}`, and pass gradients to `optimizer.apply`.",
    "before_unscaling": "Your code clips, compares or divides gradients that "
    "are still scaled, or adds an unscaled penalty, loss or noise. Call "
    "`gradients = optimizer.unscale(gradients)` first, or in place of your "
    "own division. Scale the sum of all losses.",
    "hides_overflow": "Your code makes overflowing gradients finite or drops "
    "them. So no step is skipped, and the loss scale never falls. Pass all "
    "gradients to `optimizer.apply` unchanged.",
    "writes_overflow": "Your code writes overflowing gradients into the "
    "weights. Pass gradients to `optimizer.apply`, which skips such a step. "
    "If you change weights temporarily, restore them from a copy.",
    "over_steps": "Your code carries scaled values from step to step, such as "
    "gradients, their average, a limit or a learning rate. Call `gradients = "
    "optimizer.unscale(gradients)` before you store them. Apply the optimizer "
    "that scaled the loss.",
    "part_of_loss": "{behind} returns gradients that do not follow the loss "
    "scale. Scale the sum of all losses with `optimizer.{scaling}`. In a "
    "`custom_gradient`, multiply by the upstream gradient.",
    "below": "Its gradients overflow at this loss scale. Lower the scale to "
    "2**{advised_bits}. Lower `min_scale` too if it is higher.",
}


# The keys are cases that a different loss scale cures, if one scale suits all
# layers. If no scale does, the advice is that of the case in the value.
_OTHER_SCALE = {"above": "vanishes", "unscaled": "vanishes", "below": "steep"}


def advice(kind: str, layer: str | None = None, **numbers) -> str:
    """Returns the advice for a kind of verdict.

    Args:
        kind: String. The kind of the verdict.
        layer: String. The layer's path. Defaults to `None`.
        **numbers: The numbers of the verdict.
    """
    if kind == "bad_data":
        parts = (re.match("(?:rows|samples)_of_(.+)", name) for name in numbers)
        first = next(filter(None, parts), None)
        return bad_data_advice(first[1] if first else "x")
    if kind == "divergence" and (text := _advice_on_divergence(numbers)):
        return text
    text = _CASES["in_training"]
    if kind != "forward_overflow":
        fell = "fell_from_bits" in numbers
        text = _CASES["fell"] if fell else KINDS[kind].advice
    text = text.format(layer=layer, **numbers)
    for name, value in numbers.items():
        if name.startswith(("epsilon", "beta")):
            sentence = _BETA if name.startswith("beta") else _EPSILON
            text += sentence.format(name=name, value=value)
    return text


def _rate(learning_rate=None, learning_rate_at_first=None, **_):
    """Returns the learning rate in parentheses, or "" if it is unknown."""
    if learning_rate is None:
        return ""
    # Name both learning rates, because a schedule may have changed the rate
    # since training began.
    first = learning_rate_at_first
    before = "" if first is None else f"{first:.6g} at first, "
    return f" ({before}now {learning_rate:.6g})"


# Remedies for operations with a non-finite result. An entry applies if its key
# occurs in the text of the operation.
_HINTS = {
    "log": "Add a small number inside, as in keras.ops.log(x + 1e-7), or "
    "compute the loss from logits.",
    "exp": "Subtract the maximum first, or clip its operand.",
    " / ": "Add a small number to the divisor. The gradient of a square root "
    "or a norm at 0 divides by 0. Add a small number inside, as in "
    "keras.ops.sqrt(x + 1e-6).",
    "sqrt": "Add a small number inside, as in keras.ops.sqrt(x + 1e-6).",
    "reciprocal": "Add a small number to its operand.",
}


def _advice_on_divergence(numbers):
    if "cause" in numbers:
        return _advice_on_cause(numbers)
    if "input" in numbers:
        return _CASES["large_input"].format(**numbers)
    if "made_in" in numbers:
        return _CASES["between_gradients"]
    if "not_finite" in numbers:
        return _advice_on_operation(numbers)
    if "largest_weight_at_first" not in numbers:
        return None
    case = "loss_grew" if "loss_at_first" in numbers else "weights_grew"
    evidence = _CASES[case].format(**numbers)
    return _CASES["diverged"].format(evidence=evidence, rate=_rate(**numbers))


def _advice_on_operation(numbers):
    """Returns advice on an operation that overflows or gives NaN in float32."""
    operation = numbers.get("operation")
    if "largest_output" in numbers:
        return _CASES["grows"].format(**numbers)
    place = place_of(numbers)
    if numbers["not_finite"] == "gradients":
        what = operation or "a gradient"
        text = (
            f"The loss is finite. But in the backward pass of {place}, {what}"
        )
    else:
        what = operation or "a number"
        text = f"In {place}, {what}"
    hints = (h for key, h in _HINTS.items() if operation and key in operation)
    hint = next(hints, KINDS["divergence"].advice.partition(". ")[2])
    return f"{text} is not finite in float32 either. {hint}"


def _advice_on_cause(numbers):
    text = _CASES[numbers["cause"]] + (
        " With this change the loss falls in float32 steps repeated from step "
        "{since}."
    )
    if "learning_rate_before" in numbers and "holds" in numbers:
        text += " The learning rate was {learning_rate_before:g} at that step."
    if numbers["cause"] == "learning_rate" and "clip" in numbers:
        text += " Clipping gradients to a norm of {clip:g} also helps."
    return text.format(**numbers)


def scale_advice(case: str, numbers: dict) -> str:
    """Returns advice on code that ignores the loss scale.

    Args:
        case: String. The `case` of a `ScaleUse`.
        numbers: Dict. The evidence.
    """
    layer = numbers.get("behind")
    is_loss = layer in (None, MODEL_PATH)
    behind = "The loss" if is_loss else f"The code after layer {layer!r}"
    own = {"behind": behind, "scaling": scaling_call()}
    text = _CASES[case].format(**own)
    needs_ours = "unscale(" in text or "stateless" in text
    return f"{text} {_OURS}" if needs_ours else text


def with_advised_scale(culprit, scale, common: dict):
    """Adds the loss scale that cures a culprit to its numbers, if one does.

    The number `"advised_bits"` is a power of two that suits all layers.

    Args:
        culprit: `Culprit`.
        scale: As for `advice_for`.
        common: Dict from `common_bits`. Empty if no scale suits all layers.

    Returns:
        The `Culprit`, with the number if there is one.
    """
    case = _case(culprit) or _training_case(culprit, scale)
    if not common or case not in _OTHER_SCALE:
        return culprit
    if case == "below":
        bits = math.floor(common["highest_bits"])
    else:
        bits = math.ceil(common["lowest_bits"])
    own = {"advised_bits": bits} | ({} if scale.scales else {"scaled": False})
    return culprit._replace(numbers=culprit.numbers | own)


def advice_for(culprit, scale=None, model=None) -> str:
    """Returns the advice for a layer at fault.

    Args:
        culprit: `Culprit` from `with_advised_scale`.
        scale: `ScaleInUse` of the model. Defaults to `None`, for a run that
            does not train.
        model: The `keras.Model`. Needed only for a run that trains.
    """
    case, later = _case(culprit), "code after the layer"
    if scale is not None:
        case = case or _training_case(culprit, scale)
        later = f"{_loss_of(model)} or elsewhere after the layer"
    if case in _OTHER_SCALE and "advised_bits" not in culprit.numbers:
        case = _OTHER_SCALE[case]
    if case == "steep" and culprit.numbers["highest_bits"] + BITS_ABOVE >= 0:
        case = None  # The gradients fit at a loss scale of 1.
    if case == "unscaled" and has_own_step(model):
        case = "unscaled_step"
    return _sentence(culprit, case, later)


def advice_of_mixed_code(numbers: dict) -> str:
    """Returns advice on code that mixes dtypes even in float32.

    Args:
        numbers: Dict from `step_errors.evidence`.
    """
    dtypes = " and ".join(numbers["mixed_dtypes"])
    place = place_of(numbers) if "code" in numbers else "code outside layers"
    return (
        f"{dtypes} mix in {place}, even when all layers compute in "
        "float32. Cast one of the two there, as in keras.ops.cast(b, a.dtype)."
    )


def _loss_of(model):
    if has_own_step(model):
        return "the model's own `train_step`"
    if has_own_loss(model):
        return "the model's own `compute_loss`"
    own = isinstance(model.loss, types.FunctionType)
    return f"the loss function {model.loss.__name__!r}" if own else "the loss"


def _sentence(culprit, case, later):
    text = _CASES[case] if case else KINDS[culprit.kind].advice
    model = culprit.numbers.get("in_call_of", MODEL_PATH)
    whose = "the model's own `call`", f"the `call` of model {model!r}"
    if "input" in culprit.numbers:
        text += _CASES["input"]
    return text.format(
        layer=culprit.path,
        own_call=whose[model != MODEL_PATH],
        later_code=later,
        scaling=scaling_call(),
        **culprit.numbers,
    )


def _case(culprit):
    numbers = culprit.numbers
    if beside := numbers.keys() & {"not_held", "narrow_loss"}:
        return beside.pop()
    if "in_call_of" in numbers:
        return "between"
    if culprit.path in (None, MODEL_PATH):
        return "outside" if culprit.kind != "unsupported" else "mixed_outside"
    if "not_written" in numbers:
        return "not_written"
    if "rounded_integers" in numbers:
        return "integers"
    is_behind = numbers.keys() & {"loss", "output_error"}
    known = culprit.kind in ("cast_overflow", "precision_loss")
    return "follows" if is_behind and not known else None


def _training_case(culprit, scale):
    numbers = culprit.numbers
    if culprit.kind == "forward_overflow":
        return "in_training"
    if culprit.direction != "backward":
        return None
    if "highest_bits" in numbers:
        return _scale_case(culprit.kind, numbers, scale)
    cases = {"backward_overflow": "own_backward", "underflow": "zero_backward"}
    return cases.get(culprit.kind)


def _scale_case(kind, numbers, scale):
    """Returns the case of gradients that fit at a different loss scale."""
    if kind == "underflow":
        if not scale.scales:
            return "unscaled"
        beyond = numbers["lowest_bits"] > scale.possible[-1]
        return "above" if beyond or not scale.adapts else "vanishes"
    beyond = numbers["highest_bits"] < scale.possible[0]
    if scale.scales and (beyond or not scale.adapts):
        return "below"
    return "steep"


def bad_data_advice(part: str) -> str:
    """Returns how to find the rows of `"x"`, `"y"` or `"sample_weight"`."""
    return KINDS["bad_data"].advice.format(part=part)
