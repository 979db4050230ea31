"""Finds metrics that overflow in float16 although the loss is finite.

Keras computes the loss in float32, but a metric in the dtype of the model's
output. In float16, a relative error can overflow if a target is near 0.
"""

import math
from collections.abc import Mapping

import keras

from keras_mixprec.formats import get_format

# `fit` adds this prefix to the names of validation metrics.
VALIDATION = "val_"


class MetricValues:
    """Logs metrics that are not finite, each one once.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._told: set = set()

    def read(self, model: keras.Model, step: int, logs: Mapping | None) -> None:
        """Checks the metrics of an epoch.

        Args:
            model: A `keras.Model`.
            step: Int. The last step of the epoch.
            logs: Mapping from metric name to value, as `fit` passes it to
                `on_epoch_end`.
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
    """Returns the validation metrics in the logs, by name without `"val_"`.

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
        "of the model's output, which overflows above "
        f"{get_format('float16').maximum:,.0f}",
        "advice": "Training is not affected. Give the last layer "
        "dtype='float32', as apply_policy does by default.",
    }
