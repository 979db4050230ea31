"""The contents of TensorBoard's own dashboards for a run."""

from keras_mixprec.reporting.schema import RANGES, SPEED

# The charts of the Custom Scalars tab, with tags as regular expressions.
CHARTS = {
    "Mixed precision": {
        "loss scale (log2)": [r"mixprec/log2_loss_scale.*"],
        "skipped steps": [r"mixprec/skipped_steps.*"],
        "least headroom (bits)": [rf"{RANGES}/\w+_headroom_bits"],
        "shares lost in 16 bits": [
            rf"{RANGES}/gradient_subnormal",
            rf"{RANGES}/weight_gradient_below",
            rf"{RANGES}/lost_updates",
        ],
        "layers with infinities or NaNs": [rf"{RANGES}/nonfinite_layers"],
        "step time (s)": [rf"{SPEED}/step_time.*"],
        "samples a second": [rf"{SPEED}/samples_per_second"],
        "shares of the time": [rf"{SPEED}/(input|overhead)_share"],
        "gradient norm": [r"mixprec/gradient_norm(/\w+)?$"],
    }
}

# The settings and metrics in the HParams tab. Without a list of metrics, the
# tab would show every curve.
SETTINGS = {
    "policy": str,
    "optimizer": str,
    "learning_rate": float,
    "loss_scale": str,
    "first_loss_scale": float,
    "matmul_precision": str,
}
METRICS = {
    "mixprec/loss_scale": "loss scale",
    "mixprec/skipped_steps": "skipped steps",
    f"{RANGES}/activation_headroom_bits": "headroom of activations (bits)",
    f"{RANGES}/gradient_headroom_bits": "headroom of gradients (bits)",
    f"{RANGES}/lost_updates": "lost updates",
    f"{SPEED}/step_time_median": "step time (s)",
    f"{SPEED}/samples_per_second": "samples a second",
    f"{SPEED}/peak_memory": "peak memory (bytes)",
}
