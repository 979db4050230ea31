"""The advice for each kind of fault, in one sentence."""

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

# Added where a constant of the optimizer loses weights.
_EPSILON = (
    " The optimizer's `{name}` of {value:g} is 0 in the variables' dtype, "
    "so it divides 0 by 0 and weights become NaN. Set it to 1e-4 or keep "
    "variables in float32."
)
_BETA = (
    " The optimizer's `{name}` of {value:g} is 1 in the variables' dtype, "
    "where no weight moves or all become NaN. Set it to 0.99 or keep "
    "variables in float32."
)

# Used if nothing is trained and float32 gives NaN.
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
    "what calls the model"
)

# Used if the evidence says more than the kind does.
_CASES = {
    "diverged": "{evidence}, so precision is not the cause. Lower the learning "
    "rate{rate}, or clip gradients.",
    "large_input": "{input} is between {smallest_input:.6g} and "
    "{largest_input:.6g}, which is too large in float32 too. Normalize it "
    "first, as by keras.layers.Normalization.",
    "input": " Its input is {input}, between {smallest_input:.6g} and "
    "{largest_input:.6g}. Normalize it first, as by "
    "keras.layers.Normalization.",
    "grows": "In layer {in_layer!r} numbers grow from {largest_input:.3g} to "
    "{largest_output:.3g}, and then beyond float32. Begin with smaller "
    "weights, or normalize between steps.",
    "between_gradients": "In float32 the loss is finite, but gradients that "
    "`train_step` gives the optimizer are not. Look at what it adds, such as "
    "gradients from an earlier step, or the norm of a weight that is 0.",
    "loss_grew": "The loss was {loss_at_first:.3g} when training began. On "
    "the batch of this step it is {loss_in_float32:.3g} even in float32",
    "weights_grew": "The largest weight grew from "
    "{largest_weight_at_first:.3g} when training began to {largest_weight:.3g}",
    "learning_rate": "Set the learning rate to {holds:g}: {learning_rate:g} "
    "is too large.",
    "gradients": "Give the optimizer global_clipnorm={clip:.1f}: gradients "
    "explode, and no smaller learning rate helps.",
    "penalty": "Make the factor of the regularizer of layer {largest_of!r} "
    "smaller: the penalty is larger than the rest of the loss.",
    "inputs": "Normalize the inputs, as by keras.layers.Normalization: they "
    "reach {largest_of_inputs:.3g}.",
    "targets": "Divide the targets by their standard deviation: they reach "
    "{largest_of_targets:.3g}.",
    "in_training": KINDS["forward_overflow"].advice
    + " A smaller loss scale cannot help.",
    "follows": f"{TO_FLOAT32} What is computed from its output, in "
    "{later_code}, fails in 16 bits.",
    "own_backward": f"{TO_FLOAT32} Its backward pass overflows on gradients "
    "that fit, as a division by small numbers does. A smaller loss scale may "
    "not help.",
    "steep": f"{TO_FLOAT32} The gradient that it gets overflows at a loss "
    "scale of 1. Smaller targets, or a loss divided by a constant, may help.",
    "zero_backward": f"{TO_FLOAT32} Its backward pass divides by a number that "
    "becomes 0 in float16. Or keep its small numbers, such as an epsilon, "
    "above 6e-8.",
    "outside": f"It is in code outside of layers: {_OUTSIDE}. Cast what that "
    "code computes with: keras.ops.cast(x, 'float32').",
    "not_written": "What it assigns to {not_written!r} in its call is lost: "
    "Keras on torch writes it to the copy that a 16-bit layer casts. Make the "
    "variable by add_weight(..., autocast=False), or let the layer compute in "
    "float32: kmp.PrecisionRule({layer!r}).",
    "mixed_outside": f"Code outside of layers ({_OUTSIDE}) mixes dtypes, or "
    "uses an operation that this backend refuses in 16 bits. Cast what that "
    "code computes with: keras.ops.cast(x, 'float32').",
    "between": "It is in {own_call}, after layer {layer!r}. Cast what that "
    "code computes with, by keras.ops.cast(x, 'float32'), or let the layer "
    "compute in float32: kmp.PrecisionRule({layer!r}).",
    "not_held": "Layer {not_held!r} is called in {dtype} and is not part of "
    "the model. Make it with dtype='float32', or make it an attribute of the "
    "model, so that policies, plans and diagnoses reach it.",
    "narrow_loss": "Loss {narrow_loss!r} computes in {dtype}. Call "
    "keras.config.set_floatx('float32') before `compile`, or make the loss "
    "with dtype='float32'.",
    "fell": "Skipped steps have lowered the loss scale. Once their cause is "
    "repaired, it grows back slowly. PrecisionTuner would set it "
    "to 2**{needed_bits} at once.",
    "vanishes": f"{TO_FLOAT32} Its gradients vanish at the loss scale that "
    "other layers need.",
    "unscaled": "Its gradients vanish because nothing scales the loss enough. "
    "Call kmp.ensure_loss_scaling(model).",
    "unscaled_step": "Its gradients vanish because nothing scales the loss "
    "enough. Train with kmp.LossScaleOptimizer and call "
    "`loss = optimizer.{scaling}` in `train_step`.",
    "integers": "Its input holds whole numbers that the cast to 16 bits "
    "rounds. If they are ids, such as tokens, give keras.Input(..., "
    "dtype='int32'). Otherwise let the layer compute in float32: "
    "kmp.PrecisionRule({layer!r}).",
    "above": "Its gradients vanish at this loss scale. Raise the scale to "
    "2**{advised_bits}. If `max_scale` keeps it lower, raise that.",
    "never_scaled": "The loss is never multiplied by the loss scale, so small "
    "gradients become 0 in float16. Call `loss = optimizer.{scaling}` in "
    "`train_step` before gradients are computed.",
    "scaled_twice": "Gradients are multiplied by the loss scale once more "
    "than they are divided. Scale the loss once, by `optimizer.{scaling}`, "
    "and pass gradients to `optimizer.apply`.",
    "before_unscaling": "Your code clips, compares or divides gradients that "
    "are still scaled, or adds a penalty, a second loss or noise that is not "
    "scaled. Call `gradients = optimizer.unscale(gradients)` first, or in "
    "place of your own division, and scale the sum of all losses.",
    "hides_overflow": "Your code makes gradients that overflow finite or "
    "leaves them out. So no step is skipped, and the loss scale never falls. "
    "Pass all gradients to `optimizer.apply` unchanged.",
    "writes_overflow": "Your code writes gradients that overflow into the "
    "weights. Pass gradients to `optimizer.apply`, which skips such a step. "
    "If you move weights for a while, put them back from a copy.",
    "over_steps": "Your code keeps something from step to step that is still "
    "scaled, such as gradients, their average, a limit or a learning rate. "
    "Call `gradients = optimizer.unscale(gradients)` before that. Apply the "
    "optimizer that scaled the loss.",
    "part_of_loss": "{behind} sends back gradients that do not follow the "
    "loss scale. Scale the sum of all losses, by `optimizer.{scaling}`. A "
    "gradient of your own, such as a `custom_gradient`, must be multiplied by "
    "the gradient that it is given.",
    "below": "Its gradients overflow at this loss scale. Lower the scale to "
    "2**{advised_bits}. If `min_scale` keeps it higher, lower that.",
}


# Another loss scale cures these cases if it suits all layers. Otherwise they
# count as the case on the right.
_OTHER_SCALE = {"above": "vanishes", "unscaled": "vanishes", "below": "steep"}


def advice(kind: str, layer: str | None = None, **numbers) -> str:
    """Returns one sentence.

    Args:
        kind: String. The kind of the verdict.
        layer: String. The layer's path. Defaults to `None`.
        **numbers: What the sentence mentions.
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
    """The learning rate in parentheses, as far as it is known."""
    if learning_rate is None:
        return ""
    # A schedule may have changed it since.
    first = learning_rate_at_first
    before = "" if first is None else f"{first:.6g} at first, "
    return f" ({before}now {learning_rate:.6g})"


# Remedies for operations without a finite result, by how these are written.
_HINTS = {
    "log": "Add a small number inside, as in keras.ops.log(x + 1e-7), or "
    "compute the loss from logits.",
    "exp": "Subtract the maximum first, or clip its operand.",
    " / ": "Add a small number to what it divides by. The gradient of a square "
    "root or a norm at 0 divides by 0: keras.ops.sqrt(x + 1e-6).",
    "sqrt": "Add a small number inside, as in keras.ops.sqrt(x + 1e-6).",
    "reciprocal": "Add a small number to what it divides by.",
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
    """Advice on an operation that is not finite in float32 on finite inputs."""
    operation = numbers.get("operation")
    if "largest_output" in numbers:
        return _CASES["grows"].format(**numbers)
    place = place_of(numbers)
    if numbers["not_finite"] == "gradients":
        what = operation or "a gradient"
        text = f"The loss is finite, but in the backward pass of {place} {what}"
    else:
        what = operation or "a number"
        text = f"In {place} {what}"
    hints = (h for key, h in _HINTS.items() if operation and key in operation)
    hint = next(hints, KINDS["divergence"].advice.partition(". ")[2])
    return f"{text} is not finite in float32 either. {hint}"


def _advice_on_cause(numbers):
    text = _CASES[numbers["cause"]] + (
        " With this change the loss falls in float32 steps that start again "
        "at step {since}."
    )
    if "learning_rate_before" in numbers and "holds" in numbers:
        text += " The learning rate was {learning_rate_before:g} at that step."
    if numbers["cause"] == "learning_rate" and "clip" in numbers:
        text += " Clipping gradients to a norm of {clip:g} helps, too."
    return text.format(**numbers)


def scale_advice(case: str, numbers: dict) -> str:
    """Returns one sentence about a loss scale that is ignored.

    Args:
        case: String, of `ScaleUse`.
        numbers: Dict. The evidence.
    """
    layer = numbers.get("behind")
    is_loss = layer in (None, MODEL_PATH)
    behind = "The loss" if is_loss else f"What follows layer {layer!r}"
    own = {"behind": behind, "scaling": scaling_call()}
    text = _CASES[case].format(**own)
    needs_ours = "unscale(" in text or "stateless" in text
    return f"{text} {_OURS}" if needs_ours else text


def with_advised_scale(culprit, scale, common: dict):
    """Returns a culprit, with the loss scale that cures it if one does.

    `"advised_bits"` is a power of two that suits all layers.

    Args:
        culprit: `Culprit`.
        scale: As for `advice_for`.
        common: Dict, `common_bits` of the model, empty if no scale suits all.
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
    """Returns one sentence on a layer at fault.

    Args:
        culprit: `Culprit`, of `with_advised_scale`.
        scale: `ScaleInUse` of the model. Defaults to `None`, nothing is
            trained.
        model: The `keras.Model`, if it is trained.
    """
    case, later = _case(culprit), "code after the layer"
    if scale is not None:
        case = case or _training_case(culprit, scale)
        later = f"{_loss_of(model)} or elsewhere after the layer"
    if case in _OTHER_SCALE and "advised_bits" not in culprit.numbers:
        case = _OTHER_SCALE[case]
    if case == "steep" and culprit.numbers["highest_bits"] + BITS_ABOVE >= 0:
        case = None  # The gradients fit at a scale of 1.
    if case == "unscaled" and has_own_step(model):
        case = "unscaled_step"
    return _sentence(culprit, case, later)


def advice_of_mixed_code(numbers: dict) -> str:
    """Returns one sentence on code that mixes dtypes in float32 as well.

    Args:
        numbers: Dict, what `evidence` returned.
    """
    dtypes = " and ".join(numbers["mixed_dtypes"])
    return (
        f"{dtypes} mix in {place_of(numbers)}, even if all layers compute in "
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
    whose = "the model's own `call`", f"the own `call` of {model!r}"
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
    """Returns the case of gradients that another loss scale would hold."""
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
