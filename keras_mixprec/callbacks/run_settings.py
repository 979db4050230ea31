"""What TensorBoard's own dashboards are told at the start of a run."""

from collections import Counter

import keras

from keras_mixprec.policies import PrecisionPlan

# What the Custom Scalars tab draws together; tags as regular expressions.
CHARTS = {
    "Mixed precision": {
        "loss scale (log2)": [r"mixprec/log2_loss_scale.*"],
        "skipped steps": [r"mixprec/skipped_steps.*"],
        "least headroom (bits)": [r"mixprec/\w+_headroom_bits"],
        "shares lost in 16 bits": [
            r"mixprec/gradient_subnormal",
            r"mixprec/weight_gradient_below",
            r"mixprec/lost_updates",
        ],
        "layers with infinities or NaNs": [r"mixprec/nonfinite_layers"],
        "gradient norm": [r"mixprec/gradient_norm(/\w+)?$"],
    }
}


def settings_of(model: keras.Model) -> dict:
    """Returns what tells one run from another in the HParams tab.

    Args:
        model: A built and compiled `keras.Model`.
    """
    policies = Counter(PrecisionPlan.from_model(model).values())
    optimizer = model.optimizer
    settings = {}
    if policies:
        settings["policy"] = policies.most_common(1)[0][0]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        rule = getattr(optimizer, "rule", None)
        settings["loss_scale"] = type(rule).__name__
        settings["first_loss_scale"] = float(optimizer.loss_scale)
        optimizer = optimizer.inner_optimizer
    if optimizer is not None:
        settings["optimizer"] = type(optimizer).__name__
    return settings
