"""Rules about the optimizer, its variables and loss scaling."""

import math

import keras

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.own_step import applies_unscaled, clips_scaled
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.loss_scaling.constants import lost_constants
from keras_mixprec.loss_scaling.ensure import (
    ensure_loss_scaling,
    lacks_loss_scaling,
)
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.policies.layers import has_own_step

_Scaling = keras.optimizers.LossScaleOptimizer


@rule("KMP401", "medium")
def variables_in_16_bits(view):
    """Updates below half a digit of a 16-bit variable are lost."""
    narrow = [
        v for v in view.model.trainable_variables if v.dtype in SIXTEEN_BITS
    ]
    if narrow:
        dtype = narrow[0].dtype
        form = get_format(dtype)
        yield Finding(
            "medium",
            None,
            f"{len(narrow)} trainable variables, {narrow[0].path!r} first, and "
            f"their optimizer slots are in {dtype}, where an update of less "
            f"than {form.epsilon / 4:.0e} of a weight is lost.",
            f"Build the model under 'mixed_{dtype}', which keeps variables in "
            "float32.",
            numbers={"variables": len(narrow), "dtype": dtype},
        )


@rule("KMP402", "high")
def epsilon_of_the_optimizer(view):
    """An epsilon that is 0 in the dtype of a variable divides 0 by 0."""
    for optimizer, name, value in _lost_constants(view):
        if name.startswith("epsilon"):
            yield Finding(
                "high",
                None,
                f"{name}={value:g} of {_name(optimizer)} is 0 in 16-bit "
                "variables: a gradient of 0 makes the weight NaN.",
                f"Set {name}=1e-4, or build the model under 'mixed_float16', "
                "which keeps variables in float32.",
                numbers={name: value},
            )


@rule("KMP403", "high")
def beta_of_the_optimizer(view):
    """A beta_2 that is 1 in the dtype of a variable stops its updates."""
    for optimizer, name, value in _lost_constants(view):
        if name == "beta_2":
            yield Finding(
                "high",
                None,
                f"beta_2={value:g} of {_name(optimizer)} is 1 in 16-bit "
                "variables: no weight moves, or all become NaN.",
                "Set beta_2=0.99, or build the model under a mixed policy, "
                "which keeps variables in float32.",
                numbers={name: value},
            )


def _lost_constants(view):
    variables = view.model.trainable_variables
    for optimizer in _optimizers(view):
        for name, value in lost_constants(optimizer, variables).items():
            yield optimizer, name, value


@rule("KMP404", "high")
def no_loss_scaling(view):
    """Without loss scaling gradients below 6e-8 vanish in float16."""
    if not lacks_loss_scaling(view.model):
        return
    name = _name(view.optimizer)
    reason = (
        f"Layers compute in float16, and {name} scales no loss: gradients "
        "below 6e-8 are 0."
    )
    if has_own_step(view.model) and applies_unscaled(type(view.model)):
        fix = (
            f"Compile with LossScaleOptimizer({name}(...)), and differentiate "
            "self.optimizer.scale_loss(loss) in train_step."
        )
        yield Finding("high", None, reason, fix)
    elif view.supposed:
        fix = (
            "None is needed if the policy is set before the model is compiled: "
            "compile() wraps the optimizer then. Else call "
            "ensure_loss_scaling(model)."
        )
        yield Finding("low", None, reason, fix, call=ensure_loss_scaling)
    else:
        fix = (
            "Wrap it: ensure_loss_scaling(model), or "
            "compile(LossScaleOptimizer(optimizer), ...)."
        )
        yield Finding("high", None, reason, fix, call=ensure_loss_scaling)


@rule("KMP405", "low")
def needless_loss_scaling(view):
    """Loss scaling is for float16, no other dtype needs it."""
    narrow = [e for e in view.low if e.layer.compute_dtype == "float16"]
    for optimizer in _optimizers(view):
        if isinstance(optimizer, _Scaling) and not narrow:
            yield Finding(
                "low",
                None,
                "The optimizer scales the loss, and no layer computes in "
                "float16.",
                "Compile with its inner_optimizer, unless it is to skip steps "
                "that are not finite.",
            )


@rule("KMP406", "medium")
def constant_loss_scale(view):
    """`loss_scale_factor` skips no step: an overflow reaches the weights."""
    for optimizer in _optimizers(view):
        factor = optimizer.loss_scale_factor
        scaling = isinstance(optimizer, _Scaling)
        if factor is not None and not scaling and view.low:
            yield Finding(
                "medium",
                None,
                f"loss_scale_factor={factor:g} of {_name(optimizer)} scales "
                "the loss and applies steps that are not finite as well.",
                f"Use LossScaleOptimizer({_name(optimizer)}(...), "
                f"loss_scale={factor:g}), which skips those.",
                numbers={"loss_scale_factor": factor},
            )


@rule("KMP407", "high")
def scale_loss_never_called(view):
    """A `train_step` of your own has to scale the loss it differentiates."""
    scaling = [o for o in _optimizers(view) if isinstance(o, _Scaling)]
    if not scaling or not has_own_step(view.model):
        return
    if applies_unscaled(type(view.model)):
        done = "small gradients become 0 in float16"
        if not isinstance(scaling[0], LossScaleOptimizer):
            done = (
                "the optimizer divides gradients of an unscaled loss by "
                f"{scaling[0].initial_scale}"
            )
        yield Finding(
            "high",
            None,
            f"{type(view.model).__name__}.train_step applies gradients and "
            f"never calls scale_loss: {done}.",
            "Differentiate self.optimizer.scale_loss(loss).",
        )


@rule("KMP408", "low")
def loss_scale_without_floor(view):
    """The scale of Keras' own optimizer can reach 0, which loses weights."""
    for optimizer in _optimizers(view):
        if type(optimizer) is _Scaling:
            # Below 2**-126 float32 is flushed to 0.
            steps = math.ceil(math.log2(optimizer.initial_scale)) + 127
            yield Finding(
                "low",
                None,
                "Keras' LossScaleOptimizer halves its scale without end: "
                f"{steps} skipped steps make it 0, and the next step that is "
                "applied makes every weight NaN.",
                "Use keras_mixprec.LossScaleOptimizer; MixPrecMonitor and "
                "PrecisionTuner put it in place by themselves.",
                numbers={"skipped_steps": steps},
            )


@rule("KMP409", "medium")
def callbacks_that_read_the_loss(view):
    """A skipped step may have a loss of NaN, which some callbacks act on."""
    scaling = any(isinstance(o, _Scaling) for o in _optimizers(view))
    guarded = any(map(_is_ours, view.callbacks))
    for callback in view.callbacks if scaling and not guarded else ():
        ends = isinstance(callback, keras.callbacks.TerminateOnNaN)
        if ends or getattr(callback, "monitor", None) == "loss":
            yield Finding(
                "medium" if ends else "low",
                None,
                f"{_name(callback)} reads the training loss, which one skipped "
                "step makes NaN for the rest of its epoch.",
                "Add MixPrecMonitor() or PrecisionTuner(), which keep such "
                "batches out of the loss, or let it monitor 'val_loss'.",
                numbers={"callback": _name(callback)},
            )


@rule("KMP410", "low")
def accumulation_with_skips(view):
    """A step that is skipped leaves a gap in a window of micro-batches."""
    for optimizer in _optimizers(view):
        inner = getattr(optimizer, "inner_optimizer", None)
        steps = getattr(inner, "gradient_accumulation_steps", None)
        discards = getattr(optimizer, "discard_window", False)
        if steps and not discards:
            yield Finding(
                "low",
                None,
                f"{_name(inner)} accumulates {steps} micro-batches: one that "
                "overflows is left out of its window, the others weigh more.",
                "Nothing if that is rare; or LossScaleOptimizer(..., "
                "discard_window=True), which drops the window.",
                numbers={"gradient_accumulation_steps": steps},
            )


@rule("KMP411", "medium")
def clipping_before_unscaling(view):
    """Gradients clipped in `train_step` are still multiplied by the scale."""
    scaling = [o for o in _optimizers(view) if isinstance(o, _Scaling)]
    if scaling and has_own_step(view.model):
        clips = clips_scaled(type(view.model))
        if clips:
            yield Finding(
                "medium",
                None,
                f"{type(view.model).__name__}.train_step calls {clips} on "
                "gradients that are still multiplied by the loss scale, "
                "unless it divides them first.",
                "Let the inner optimizer clip: clipnorm=, clipvalue= or "
                "global_clipnorm=.",
                numbers={"called": clips},
            )


@rule("KMP412", "low")
def ema_of_few_digits(view):
    """An average of 16-bit variables stands still once steps are small."""
    narrow = [v for v in view.model.trainable_variables if "16" in v.dtype]
    for optimizer in _optimizers(view):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if getattr(inner, "use_ema", False) and narrow:
            share = 1 - inner.ema_momentum
            form = get_format(narrow[0].dtype)
            yield Finding(
                "low",
                None,
                f"use_ema=True averages {len(narrow)} variables in "
                f"{form.name}: of a change {share:.1e} is added, and below "
                f"{form.epsilon / 4:.0e} of the weight nothing.",
                f"Build the model under 'mixed_{form.name}'.",
            )


def _optimizers(view):
    return optimizers_of(view.model).values()


def _name(named):
    """The class of a callback, or of the user's own optimizer."""
    return type(getattr(named, "inner_optimizer", named)).__name__


def _is_ours(callback):
    """Whether it is a monitor or tuner, which keep metrics finite."""
    kinds = type(callback).__mro__
    return any(k.__module__.startswith("keras_mixprec.") for k in kinds)
