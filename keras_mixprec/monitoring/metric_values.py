"""Metrics that float16 makes infinite or NaN, though the loss is finite.

Keras computes a metric in the dtype of the model's output, and a loss in
float32: a relative error of targets near 0 leaves float16's range.
"""

import math
from collections.abc import Mapping

import keras

from keras_mixprec.formats import get_format

# The prefix of `fit` for the metrics of a validation.
VALIDATION = "val_"


class MetricValues:
    """Logs which metrics are not finite, each once.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._told: set = set()

    def read(self, model: keras.Model, step: int, logs: Mapping | None) -> None:
        """Looks at the metrics that an epoch reports.

        Args:
            model: A `keras.Model`.
            step: Int, the last step of the epoch.
            logs: Mapping from the name of a metric to its value, as `fit` gives
                it to `on_epoch_end`.
        """
        numbers = {
            name: value
            for name, value in (logs or {}).items()
            if _is_number(value) and not name.startswith(VALIDATION)
        }
        loss = numbers.get("loss", math.nan)
        found = {k: v for k, v in numbers.items() if not math.isfinite(v)}
        found = found if math.isfinite(loss) else {}
        new = {k: v for k, v in found.items() if k not in self._told}
        if new and "float16" in _output_dtypes(model):
            self._told |= new.keys()
            self._log.event(step, _event(new))
        elif self._told and numbers and not found:
            self._told.clear()
            self._log.event(step, {"kind": "metric_finite"})


def validated(logs: Mapping | None) -> dict:
    """Returns the numbers that a validation has put into the logs, by metric.

    Args:
        logs: As for `MetricValues.read`.
    """
    return {
        name.removeprefix(VALIDATION): float(value)
        for name, value in (logs or {}).items()
        if name.startswith(VALIDATION) and _is_number(value)
    }


def _is_number(value):
    return isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0


def _output_dtypes(model):
    outputs = keras.tree.flatten(getattr(model, "outputs", None))
    found = {getattr(output, "dtype", None) for output in outputs} - {None}
    return found or {model.compute_dtype}


def _event(metrics):
    several = len(metrics) > 1
    which = "the metrics" if several else "the metric"
    named, are = " and ".join(metrics), "are" if several else "is"
    return {
        "kind": "metric_not_finite",
        "metrics": {name: str(float(v)) for name, v in metrics.items()},
        "message": f"{which} {named} {are} not finite although the loss is: "
        f"Keras computes {'them' if several else 'it'} in float16, the dtype "
        "of the model's output, whose largest number is "
        f"{get_format('float16').maximum:,.0f}",
        "advice": "Training is fine. Give the last layer "
        "dtype='float32', as apply_policy does by default.",
    }
