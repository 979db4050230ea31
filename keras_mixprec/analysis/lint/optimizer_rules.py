"""Rules about the optimizer, its variables and loss scaling."""

import math

import keras

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.loss_scaling.constants import becomes_instead, lost_constants
from keras_mixprec.loss_scaling.ensure import (
    ensure_loss_scaling,
    lacks_loss_scaling,
)
from keras_mixprec.policies.layers import has_own_step

_Scaling = keras.optimizers.LossScaleOptimizer


@rule("KMP401", "medium")
def variables_in_16_bits(view):
    """Updates below half a digit of a 16-bit variable are lost.

    Why: Weights stop moving once updates are small. A mixed policy avoids that.
    Example: a model built under the policy "float16".
    Fix: build the model under "mixed_float16" or "mixed_bfloat16".
    """
    variables = view.model.trainable_variables
    narrow = [v for v in variables if v.dtype in SIXTEEN_BITS]
    if narrow:
        dtype = narrow[0].dtype
        form = get_format(dtype)
        yield Finding(
            f"{len(narrow)} trainable variables, {narrow[0].path!r} first, and "
            f"their optimizer slots are in {dtype}, where an update of less "
            f"than {form.epsilon / 4:.0e} of a weight is lost.",
            f"Build the model under 'mixed_{dtype}', which keeps variables in "
            "float32.",
            numbers={"variables": len(narrow), "dtype": dtype},
        )


@rule("KMP402", "high")
def constant_of_the_optimizer(view):
    """An epsilon that is 0 or a beta_2 that is 1 in 16 bits loses weights.

    Why: Adam divides by 0, or its second moment never decays.
    Example: `epsilon=1e-8` with variables in float16.
    Fix: set the constant that the finding names, or use a mixed policy.
    """
    for optimizer in _optimizers(view):
        lost = lost_constants(optimizer, view.model.trainable_variables)
        for name, value in lost.items():
            becomes, fix = becomes_instead(name)
            yield Finding(
                f"{name}={value:g} of {_name(optimizer)} rounds to {becomes} "
                "in 16-bit variables: no weight moves, or all become NaN.",
                f"Set {name}={fix}, or build the model under a mixed policy, "
                "which keeps variables in float32.",
                numbers={name: value},
            )


@rule("KMP404", "high")
def no_loss_scaling(view):
    """Gradients below 6e-8 become 0 in float16 without loss scaling.

    Why: Small gradients become 0, and their layers do not learn.
    Example: `compile("adam", auto_scale_loss=False)` in mixed_float16.
    Fix: call `ensure_loss_scaling(model)`.
    """
    if not lacks_loss_scaling(view.model):
        return
    name = _name(view.model.optimizer)
    reason = (
        f"Layers compute in float16, and {name} scales no loss: gradients "
        "below 6e-8 are 0."
    )
    if has_own_step(view.model):
        fix = (
            f"Compile with LossScaleOptimizer({name}(...)), and differentiate "
            "self.optimizer.scale_loss(loss) in train_step."
        )
        yield Finding(reason, fix)
    elif view.supposed:
        fix = (
            "None is needed if the policy is set before the model is compiled: "
            "compile() wraps the optimizer then. Else call "
            "ensure_loss_scaling(model)."
        )
        yield Finding(reason, fix, call=ensure_loss_scaling, severity="low")
    else:
        fix = (
            "Wrap it: ensure_loss_scaling(model), or "
            "compile(LossScaleOptimizer(optimizer), ...)."
        )
        yield Finding(reason, fix, call=ensure_loss_scaling)


@rule("KMP406", "medium")
def constant_loss_scale(view):
    """`loss_scale_factor` skips no step: an overflow reaches the weights.

    Why: One overflow makes all weights NaN.
    Example: `Adam(loss_scale_factor=1024)`.
    Fix: use `LossScaleOptimizer` with the same `loss_scale`.
    """
    for optimizer in _optimizers(view):
        factor = optimizer.loss_scale_factor
        scaling = isinstance(optimizer, _Scaling)
        if factor is not None and not scaling and view.low:
            yield Finding(
                f"loss_scale_factor={factor:g} of {_name(optimizer)} scales "
                "the loss and applies steps that are not finite as well.",
                f"Use LossScaleOptimizer({_name(optimizer)}(...), "
                f"loss_scale={factor:g}), which skips those.",
                numbers={"loss_scale_factor": factor},
            )


@rule("KMP408", "low")
def loss_scale_without_floor(view):
    """The scale of Keras' own optimizer can reach 0, which loses weights.

    Why: A run of failing batches halves the scale until it is 0.
    Example: 142 batches with a NaN in a row.
    Fix: use `keras_mixprec.LossScaleOptimizer`, which has a floor.
    """
    for optimizer in _optimizers(view):
        if type(optimizer) is _Scaling:
            # Below 2**-126 float32 is flushed to 0.
            steps = math.ceil(math.log2(optimizer.initial_scale)) + 127
            yield Finding(
                "Keras' LossScaleOptimizer halves its scale without end: "
                f"{steps} skipped steps make it 0, and the next step that is "
                "applied makes every weight NaN.",
                "Use keras_mixprec.LossScaleOptimizer; MixPrecMonitor and "
                "PrecisionTuner put it in place by themselves.",
                numbers={"skipped_steps": steps},
            )


@rule("KMP409", "medium")
def callbacks_that_read_the_loss(view):
    """A skipped step may have a loss of NaN, which some callbacks act on.

    Why: The callback ends training, or saves nothing, for one harmless skipped
    step.
    Example: `TerminateOnNaN()` beside a dynamic loss scale.
    Fix: add `MixPrecMonitor()`, or let the callback monitor "val_loss".
    """
    scaling = any(isinstance(o, _Scaling) for o in _optimizers(view))
    guarded = any(map(_is_ours, view.callbacks))
    for callback in view.callbacks if scaling and not guarded else ():
        ends = isinstance(callback, keras.callbacks.TerminateOnNaN)
        if ends or getattr(callback, "monitor", None) == "loss":
            yield Finding(
                f"{_name(callback)} reads the training loss, which one skipped "
                "step makes NaN for the rest of its epoch.",
                "Add MixPrecMonitor() or PrecisionTuner(), which keep such "
                "batches out of the loss, or let it monitor 'val_loss'.",
                numbers={"callback": _name(callback)},
                severity="medium" if ends else "low",
            )


def _optimizers(view):
    return optimizers_of(view.model).values()


def _name(named):
    """The class of a callback, or of the user's own optimizer."""
    return type(getattr(named, "inner_optimizer", named)).__name__


def _is_ours(callback):
    """Returns `True` for a monitor or tuner, which keep metrics finite."""
    kinds = type(callback).__mro__
    return any(k.__module__.startswith("keras_mixprec.") for k in kinds)
