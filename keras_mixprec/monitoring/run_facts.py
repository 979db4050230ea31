"""What the log is given at the start: settings and the dtype of each layer."""

from collections import Counter

import keras

from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.summary import precision_summary

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


class LayerLog:
    """Logs the table of a model's layers at the start and on each change.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
    """

    def __init__(self, model, log):
        self._model = model
        self._log = log
        self._plan = self._last_step = None

    def write(self, step: int) -> dict | None:
        """Logs the table if the dtypes are others than they were.

        Args:
            step: Int. The number of the next batch.

        Returns:
            Dict from paths to compute dtypes, `None` if nothing has changed.
        """
        plan = PrecisionPlan.from_model(self._model)
        if plan == self._plan:
            return None
        table = precision_summary(self._model).to_list()
        # With what has changed since the last step none was taken.
        if step != self._last_step:
            self._plan, self._last_step = plan, step
            self._log.layers(step, table)
        return {row["path"]: row["compute_dtype"] for row in table}
