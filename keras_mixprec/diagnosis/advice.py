"""What a person would do about each kind of fault, in one sentence."""

from keras_mixprec.loss_scaling.by_hand import scaling_call

_TO_FLOAT32 = "Let it compute in float32: PrecisionRule({layer!r})"

_ADVICE = {
    "weights_lost": "Restore a checkpoint from before: training cannot bring "
    "back weights that are not finite.",
    "bad_data": "Drop or repair these rows, no precision helps: of an array "
    "`{part}` np.flatnonzero(~np.isfinite({part}).reshape(len({part}), "
    "-1).all(axis=1)) finds all of them.",
    "divergence": "float32 fails on this batch as well, so it is no matter of "
    "precision: lower the learning rate, clip gradients or look at the loss.",
    "cast_overflow": f"{_TO_FLOAT32}, or scale its input down to below 65504.",
    "forward_overflow": f"{_TO_FLOAT32}, or clamp or scale down before the "
    "sum, square or product that overflows; a smaller loss scale cannot help.",
    "backward_overflow": f"{_TO_FLOAT32}: its gradients overflow at a loss "
    "scale that the other layers need.",
    "underflow": f"{_TO_FLOAT32}, or keep its small numbers, such as an "
    "epsilon, above 6e-8.",
    "precision_loss": f"{_TO_FLOAT32} and not bfloat16, which has still fewer "
    "digits: it is finite but wrong.",
    "scale_collapsed": "No loss scale helps, so its cause is elsewhere: call "
    "keras_mixprec.diagnose(model, x, y) on a batch whose step is skipped.",
    "unsupported": f"{_TO_FLOAT32}: this backend refuses the operation in 16 "
    "bits, or to mix dtypes; for a mix, cast one of them there, as in "
    "keras.ops.cast(b, a.dtype).",
    "policy": "Use the policy 'mixed_float16', which keeps variables in "
    "float32: 16-bit variables lose small updates.",
    "scale_search": "Nothing: the loss scale is on its way down to where "
    "gradients fit, and skips steps until then.",
}

_UNSCALED = (
    "Its gradients vanish because nothing scales the loss enough: call "
    "keras_mixprec.ensure_loss_scaling(model)."
)

_UNSCALED_STEP = (
    "Its gradients vanish because nothing scales the loss enough: train with "
    "keras_mixprec.LossScaleOptimizer and call "
    "`loss = optimizer.{call}` in `train_step`."
)

_INTEGERS = (
    "Its input is integers, such as token ids, which the cast to 16 bits "
    "rounds: give keras.Input(..., dtype='int32'), or let it compute in "
    "float32: PrecisionRule({layer!r})"
)


def advice(
    kind: str,
    layer: str | None = None,
    unscaled: bool = False,
    integers: bool = False,
    own_step: bool = False,
) -> str:
    """Returns one sentence.

    Args:
        kind: String. The kind of the verdict.
        layer: String. The layer's path. Defaults to `None`.
        unscaled: Boolean. Whether it takes no more than a loss scale. Defaults
            to `False`.
        integers: Boolean. Whether integers are rounded by a cast. Defaults to
            `False`.
        own_step: Boolean. Whether the user has written the `train_step`.
            Defaults to `False`.
    """
    if kind == "bad_data":
        return bad_data_advice("x")
    if unscaled and own_step:
        return _UNSCALED_STEP.format(call=scaling_call())
    if unscaled:
        return _UNSCALED
    return (_INTEGERS if integers else _ADVICE[kind]).format(layer=layer)


def bad_data_advice(part: str) -> str:
    """Returns how to find the rows of `"x"`, `"y"` or `"sample_weight"`."""
    return _ADVICE["bad_data"].format(part=part)
