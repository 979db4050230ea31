"""What a person would do about each kind of fault, in one sentence."""

import math
import types

from keras_mixprec.diagnosis.thresholds import BITS_ABOVE
from keras_mixprec.loss_scaling.scaling import scaling_call
from keras_mixprec.policies.layers import (
    MODEL_PATH,
    has_own_loss,
    has_own_step,
)
from keras_mixprec.verdict_kinds import KINDS, TO_FLOAT32

# Of an optimizer, added to what is lost by it.
_EPSILON = (
    " The optimizer's `{name}` of {value:g} is 0 in the variables' dtype, "
    "where 0 / 0 makes weights NaN: set it to 1e-4 or keep variables in "
    "float32."
)
_BETA = (
    " The optimizer's `{name}` of {value:g} is 1 in the variables' dtype, "
    "where no weight moves or all become NaN: set it to 0.99 or keep "
    "variables in float32."
)

# Of a variable that a layer writes itself, in the same place.
_STANDS_STILL = (
    " {variable!r} of layer {layer!r}{more} stands still: what a step adds is "
    "less than half of its last digit. Give the layer dtype='mixed_{dtype}', "
    "or make it by add_weight(..., dtype='float32', autocast=False) and "
    "compute its next value in float32."
)

# Where nothing is trained, and float32 gives NaN.
FLOAT32_FAILS_TOO = (
    "float32 gives NaN on this batch as well, so it is no matter of precision: "
    "look at the inputs, the weights and the masks."
)

# Where the evidence says more than the kind does.
_CASES = {
    "in_training": KINDS["forward_overflow"].advice.rstrip(".")
    + "; a smaller loss scale cannot help.",
    "follows": f"{TO_FLOAT32}: what is computed from its output, in "
    "{loss_code} or elsewhere after the layer, does not bear 16 bits.",
    "own_loss": "What {loss_code} computes from the output of {layer!r} does "
    "not bear 16 bits: cast it there by keras.ops.cast(y_pred, 'float32'), or "
    "let the layer compute in float32: PrecisionRule({layer!r}).",
    "follows_in_call": f"{TO_FLOAT32}: what is computed from its output, after "
    "the layer, does not bear 16 bits.",
    "own_backward": f"{TO_FLOAT32}: its backward pass overflows on gradients "
    "that fit, as a division by small numbers does; a smaller loss scale may "
    "not help.",
    "steep": f"{TO_FLOAT32}: what the loss, or whatever follows, sends back to "
    "it overflows at a loss scale of 1, as the gradient of log(p) does where a "
    "probability is nearly 0; compute such a loss from logits.",
    "zero_backward": f"{TO_FLOAT32}: its backward pass divides by a number "
    "that underflows; keep its small numbers, such as an epsilon, above 6e-8.",
    "outside": "It is in the code outside of layers (the model's `call`, "
    "`compute_loss` or `train_step`): cast what it computes with by "
    "keras.ops.cast(x, 'float32').",
    "not_written": "What it assigns to {not_written!r} in its call is lost: "
    "Keras on torch writes it to the copy that a 16-bit layer casts. Make the "
    "variable by add_weight(..., autocast=False), or let the layer compute in "
    "float32: PrecisionRule({layer!r}).",
    "mixed_outside": "The code outside of layers (the model's `call`, "
    "`compute_loss` or `train_step`) mixes dtypes, or uses an operation that "
    "this backend refuses in 16 bits: cast what it computes with by "
    "keras.ops.cast(x, 'float32').",
    "outside_in_call": "It is in the code outside of layers (the model's "
    "`call` or `predict_step`, or what calls the model): cast what it computes "
    "with by keras.ops.cast(x, 'float32').",
    "between": "It is in {own_call}, after layer {layer!r}: cast what it "
    "computes with by keras.ops.cast(x, 'float32'), or let the layer compute "
    "in float32: PrecisionRule({layer!r}).",
    "not_held": "Layer {not_held!r} is called in {dtype} and is no part of the "
    "model: make it with dtype='float32', or make it an attribute of the "
    "model, so that policies, plans and diagnoses know of it.",
    "regularizer": f"{TO_FLOAT32}: the loss of its `activity_regularizer`, a "
    "sum over its output in 16 bits, overflows; a smaller loss scale cannot "
    "help.",
    "regularizer_refused": f"{TO_FLOAT32}: this backend does not add the loss "
    "of its `activity_regularizer`, which is in 16 bits, to the others.",
    "epsilon": f"{TO_FLOAT32}, or keep {{constant}} above 6e-8: in float16 it "
    "is 0.",
    "fell": "The loss scale fell with the steps that were skipped: once what "
    "overflows in them is mended it grows back by itself, and PrecisionTuner "
    "raises it to 2**{needed_bits} at once.",
    "vanishes": f"{TO_FLOAT32}: its gradients vanish at a loss scale that the "
    "other layers need.",
    "unscaled": "Its gradients vanish because nothing scales the loss enough: "
    "call keras_mixprec.ensure_loss_scaling(model).",
    "unscaled_step": "Its gradients vanish because nothing scales the loss "
    "enough: train with keras_mixprec.LossScaleOptimizer and call "
    "`loss = optimizer.{scaling}` in `train_step`.",
    "integers": "Its input is integers, such as token ids, which the cast to "
    "16 bits rounds: give keras.Input(..., dtype='int32'), or let it compute "
    "in float32: PrecisionRule({layer!r})",
    "above": "Raise the loss scale to 2**{advised_bits}, or the `max_scale` "
    "that keeps it below: where it is now its gradients vanish.",
    "below": "Lower the loss scale to 2**{advised_bits}, or the `min_scale` "
    "that keeps it above: where it is now its gradients overflow.",
}


def advice(kind: str, layer: str | None = None, **numbers) -> str:
    """Returns one sentence.

    Args:
        kind: String. The kind of the verdict.
        layer: String. The layer's path. Defaults to `None`.
        **numbers: What the sentence mentions.
    """
    if kind == "bad_data":
        return bad_data_advice("x")
    text = _CASES["in_training"]
    if kind != "forward_overflow":
        fell = "fell_from_bits" in numbers
        text = _CASES["fell"] if fell else KINDS[kind].advice
    text = text.format(layer=layer, **numbers)
    for name, value in numbers.items():
        if name.startswith(("epsilon", "beta")):
            sentence = _BETA if name.startswith("beta") else _EPSILON
            text += sentence.format(name=name, value=value)
    if "standing_still" in numbers:
        others = numbers["standing_still"] - 1
        more = f" (and {others} more)" if others else ""
        text += _STANDS_STILL.format(layer=layer, more=more, **numbers)
    return text


def with_advised_scale(culprit, scale, common: dict):
    """Returns a culprit, with the loss scale that it needs if that is given.

    As `"advised_bits"`, a power of two, which suits all layers if one does.

    Args:
        culprit: `Culprit`.
        scale: As for `advice_for`.
        common: Dict, `common_bits` of the model.
    """
    case = _case(culprit) or _training_case(culprit, scale)
    ends = culprit.numbers | common
    if case == "above":
        bits = math.ceil(ends["lowest_bits"])
    elif case == "below":
        bits = math.floor(ends["highest_bits"])
    else:
        return culprit
    return culprit._replace(numbers=culprit.numbers | {"advised_bits": bits})


def advice_for(culprit, scale, model, last: str | None = None) -> str:
    """Returns one sentence on a layer at fault.

    Args:
        culprit: `Culprit`, of `with_advised_scale`.
        scale: `ScaleInUse` of the model.
        model: The `keras.Model`.
        last: String. The path of the last layer that computes in 16 bits: what
            is computed from its output is the loss. Defaults to `None`.
    """
    case = _case(culprit) or _training_case(culprit, scale)
    if case == "unscaled" and has_own_step(model):
        case = "unscaled_step"
    code = _own_loss_code(model)
    if case == "follows" and code and culprit.path == last:
        case = "own_loss"
    loss_code = code or _loss_of(model)
    return _sentence(culprit, case, scaling=scaling_call(), loss_code=loss_code)


def advice_in_call(culprit) -> str:
    """Returns one sentence on a layer at fault where nothing is trained.

    Args:
        culprit: `Culprit`.
    """
    case = _case(culprit)
    if case == "outside":
        case = "outside_in_call"
    elif "output_error" in culprit.numbers:
        case = "follows_in_call"
    return _sentence(culprit, case)


def _own_loss_code(model):
    """The user's own code that computes a loss in the dtype of the outputs.

    What `compile` is given is handed float32 by Keras: a cast there is no help.
    """
    if has_own_step(model):
        return "the model's own `train_step`"
    return "the model's own `compute_loss`" if has_own_loss(model) else None


def _loss_of(model):
    own = isinstance(model.loss, types.FunctionType)
    return f"the loss function {model.loss.__name__!r}" if own else "the loss"


def _sentence(culprit, case, **window):
    text = _CASES[case] if case else KINDS[culprit.kind].advice
    model = culprit.numbers.get("in_call_of", MODEL_PATH)
    whose = "the model's own `call`", f"the own `call` of {model!r}"
    return text.format(
        layer=culprit.path,
        own_call=whose[model != MODEL_PATH],
        **culprit.numbers,
        **window,
    )


def _case(culprit):
    numbers = culprit.numbers
    if "not_held" in numbers:
        return "not_held"
    if any(layer.activity_regularizer for layer in culprit.layers[:1]):
        if culprit.kind == "unsupported":
            return "regularizer_refused"
        # Its loss counts as an output; of others the penalty is infinite too.
        only = numbers.get("nonfinite_outputs") == 1
        if culprit.kind == "forward_overflow" and only:
            return "regularizer"
    if "in_call_of" in numbers:
        return "between"
    if culprit.path in (None, MODEL_PATH):
        return "outside" if culprit.kind != "unsupported" else "mixed_outside"
    if "not_written" in numbers:
        return "not_written"
    if "rounded_integers" in numbers:
        return "integers"
    known = culprit.kind in ("cast_overflow", "precision_loss")
    if "loss" in numbers and not known:
        return "follows"
    return "epsilon" if "constant" in numbers else None


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
    """Of gradients that a loss scale other than the one in use would hold."""
    if kind == "underflow":
        if not scale.scales:
            return "unscaled"
        beyond = numbers["lowest_bits"] > scale.possible[-1]
        return "above" if beyond or not scale.adapts else "vanishes"
    beyond = numbers["highest_bits"] < scale.possible[0]
    if beyond or not scale.adapts:
        return "below"
    return "steep" if numbers["highest_bits"] + BITS_ABOVE < 0 else None


def bad_data_advice(part: str) -> str:
    """Returns how to find the rows of `"x"`, `"y"` or `"sample_weight"`."""
    return KINDS["bad_data"].advice.format(part=part)
