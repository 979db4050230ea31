"""Metrics that float16 makes infinite or NaN, though the loss is finite.

Keras computes a metric in the dtype of the model's output, and a loss in
float32: a relative error of targets near 0 leaves float16's range.
"""

import math
from collections.abc import Mapping

import keras

from keras_mixprec.formats import get_format

_VALIDATION = "val_"


class MetricValues:
    """Logs which metrics are not finite, each once.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._told: set = set()

    def read(self, model: keras.Model, step: int, logs: Mapping | None) -> None:
        """Looks at what an epoch reports.

        Args:
            model: A `keras.Model`.
            step: Int, the last step of the epoch.
            logs: Mapping from the name of a metric to its value, as `fit` gives
                it to `on_epoch_end`.
        """
        numbers = {k: v for k, v in (logs or {}).items() if _is_number(v)}
        found = {
            name.removeprefix(_VALIDATION): value
            for name, value in numbers.items()
            if not math.isfinite(value) and _loss_is_finite(name, numbers)
        }
        new = {k: v for k, v in found.items() if k not in self._told}
        if new and "float16" in _output_dtypes(model):
            self._told |= new.keys()
            self._log.event(step, _event(new))


def _is_number(value):
    return isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0


def _loss_is_finite(name, numbers):
    validation = _VALIDATION if name.startswith(_VALIDATION) else ""
    return math.isfinite(numbers.get(f"{validation}loss", math.nan))


def _output_dtypes(model):
    outputs = keras.tree.flatten(getattr(model, "outputs", None))
    found = {getattr(output, "dtype", None) for output in outputs} - {None}
    return found or {model.compute_dtype}


def _event(metrics):
    listed = ", ".join(f"{name} is {v}" for name, v in metrics.items())
    which, its = ("metrics", "their") if len(metrics) > 1 else ("metric", "its")
    return {
        "kind": "metric_not_finite",
        "metrics": {name: str(float(v)) for name, v in metrics.items()},
        "message": f"the {which} {listed}, though the loss is finite: Keras "
        f"computes {its} value in float16, the dtype of the model's output, "
        f"whose largest number is {get_format('float16').maximum:,.0f}",
        "advice": "Nothing is wrong with training. Give the last layer "
        "dtype='float32', as apply_policy does by default.",
    }
