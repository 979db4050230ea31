"""What a person would do about each kind of fault, in one sentence."""

from keras_mixprec.policies.layers import MODEL_PATH

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
    "policy": "Use the policy 'mixed_float16', which keeps variables in "
    "float32: 16-bit variables lose small updates.",
    "scale_search": "Nothing: the loss scale is on its way down to where "
    "gradients fit, and skips steps until then.",
}

# Faults of a computation: without a layer it is one outside of layers.
_OF_LAYERS = (
    "cast_overflow",
    "forward_overflow",
    "backward_overflow",
    "underflow",
    "precision_loss",
)

_UNSCALED = (
    "Its gradients vanish because nothing scales the loss enough: call "
    "keras_mixprec.ensure_loss_scaling(model)."
)


_OUTSIDE = (
    "It is in the code outside of layers (the model's `call`, `compute_loss` "
    "or `train_step`): cast what it computes with by keras.ops.cast(x, "
    "'float32')."
)


def advice(kind: str, layer: str | None = None, unscaled: bool = False) -> str:
    """Returns one sentence.

    Args:
        kind: String. The kind of the verdict.
        layer: String. The layer's path, the model's for its code outside of
            layers. Defaults to `None`.
        unscaled: Boolean. Whether it takes no more than a loss scale. Defaults
            to `False`.
    """
    if kind == "bad_data":
        return bad_data_advice("x")
    if layer in (None, MODEL_PATH) and kind in _OF_LAYERS:
        return _OUTSIDE
    return _UNSCALED if unscaled else _ADVICE[kind].format(layer=layer)


def bad_data_advice(part: str) -> str:
    """Returns how to find the rows of `"x"`, `"y"` or `"sample_weight"`."""
    return _ADVICE["bad_data"].format(part=part)
