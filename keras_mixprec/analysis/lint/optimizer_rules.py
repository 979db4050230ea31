"""Rules about the optimizer, its variables and loss scaling."""

import keras

from keras_mixprec.analysis.lint.findings import Finding, rule
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
    """Small updates of variables in 16 bits are rounded away.

    Why: Weights stop moving once updates are small. A mixed policy keeps
    variables in float32.
    Example: a model built under the policy "float16".
    Fix: build the model under "mixed_float16" or "mixed_bfloat16".
    """
    variables = view.model.trainable_variables
    narrow = [v for v in variables if v.dtype in SIXTEEN_BITS]
    if narrow:
        dtype = narrow[0].dtype
        form = get_format(dtype)
        yield Finding(
            f"{len(narrow)} trainable variables (such as {narrow[0].path!r}) "
            f"and their optimizer slots are in {dtype}, so an update below "
            f"{form.epsilon / 4:.0e} of a weight is lost.",
            f"Build the model under 'mixed_{dtype}', which keeps variables in "
            "float32.",
            numbers={"variables": len(narrow), "dtype": dtype},
        )


@rule("KMP402", "high")
def constant_of_the_optimizer(view):
    """A constant of the optimizer becomes 0 or 1 in its 16-bit variables.

    Why: Adam divides by 0, or its second moment never decays.
    Example: `epsilon=1e-8` with variables in float16.
    Fix: set the constant that the finding names, or use a mixed policy.
    """
    for optimizer in _optimizers(view):
        lost = lost_constants(optimizer, view.model.trainable_variables)
        for name, value in lost.items():
            becomes, fix = becomes_instead(name)
            yield Finding(
                f"{_name(optimizer)}'s {name}={value:g} rounds to {becomes} in "
                "16-bit variables, so weights stop moving or become NaN.",
                f"Set {name}={fix}, or build the model under a mixed policy, "
                "which keeps variables in float32.",
                numbers={name: value},
            )


@rule("KMP404", "high")
def no_loss_scaling(view):
    """Gradients below 3e-8 become 0 in float16 without loss scaling.

    Why: Layers with such gradients do not learn.
    Example: `compile("adam", auto_scale_loss=False)` in mixed_float16.
    Fix: call `ensure_loss_scaling(model)`.
    """
    if not lacks_loss_scaling(view.model):
        return
    name = _name(view.model.optimizer)
    reason = (
        f"Layers compute in float16, and {name} does not scale the loss, so "
        "gradients below 3e-8 become 0."
    )
    if has_own_step(view.model):
        fix = (
            f"Compile with LossScaleOptimizer({name}(...)), and differentiate "
            "self.optimizer.scale_loss(loss) in train_step."
        )
        yield Finding(reason, fix)
    elif view.supposed:
        fix = (
            "Set the policy before you compile the model: compile() then wraps "
            "the optimizer. Otherwise call ensure_loss_scaling(model)."
        )
        yield Finding(reason, fix, call=ensure_loss_scaling, severity="low")
    else:
        fix = (
            "Call ensure_loss_scaling(model), or compile the model with "
            "LossScaleOptimizer(optimizer)."
        )
        yield Finding(reason, fix, call=ensure_loss_scaling)


@rule("KMP406", "medium")
def constant_loss_scale(view):
    """With `loss_scale_factor`, steps with non-finite gradients are applied.

    Why: One overflow makes all weights NaN.
    Example: `Adam(loss_scale_factor=1024)`.
    Fix: use `LossScaleOptimizer` with the same `loss_scale`.
    """
    for optimizer in _optimizers(view):
        factor = optimizer.loss_scale_factor
        scaling = isinstance(optimizer, _Scaling)
        if factor is not None and not scaling and view.low:
            yield Finding(
                f"{_name(optimizer)}'s loss_scale_factor={factor:g} scales the "
                "loss, but steps with non-finite gradients are applied too.",
                f"Use LossScaleOptimizer({_name(optimizer)}(...), "
                f"loss_scale={factor:g}), which skips such steps.",
                numbers={"loss_scale_factor": factor},
            )


@rule("KMP409", "medium")
def callbacks_that_read_the_loss(view):
    """A callback reacts to the NaN loss of a skipped step.

    Why: One harmless skipped step ends training, or keeps the callback from
    saving the model.
    Example: `TerminateOnNaN()` with a dynamic loss scale.
    Fix: add `MixPrecMonitor()`, or let the callback monitor "val_loss".
    """
    scaling = any(isinstance(o, _Scaling) for o in _optimizers(view))
    guarded = any(map(_is_ours, view.callbacks))
    for callback in view.callbacks if scaling and not guarded else ():
        ends = isinstance(callback, keras.callbacks.TerminateOnNaN)
        if ends or getattr(callback, "monitor", None) == "loss":
            yield Finding(
                f"{_name(callback)} reads the training loss. One skipped step "
                "makes this loss NaN for the rest of the epoch.",
                "Add MixPrecMonitor() or PrecisionTuner(), which keep such "
                "batches out of the loss. Or let the callback monitor "
                "'val_loss'.",
                numbers={"callback": _name(callback)},
                severity="medium" if ends else "low",
            )


def _optimizers(view):
    return optimizers_of(view.model).values()


def _name(named):
    return type(getattr(named, "inner_optimizer", named)).__name__


def _is_ours(callback):
    """Returns `True` for a monitor or tuner, which keep metrics finite."""
    kinds = type(callback).__mro__
    return any(k.__module__.startswith("keras_mixprec.") for k in kinds)
