"""Finds metrics and losses that 16-bit predictions make wrong.

Keras gives a metric the predictions in the dtype of the model's output, and a
metric may add and square them in that dtype. The check computes each metric
again on the same predictions, cast to float32. That cast is exact, so any
difference comes from the metric.
"""

import math
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.verdict import Finding, Verdict
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import compiled_loss
from keras_mixprec.numerics.arrays import is_float
from keras_mixprec.numerics.evaluation import leaving_no_trace
from keras_mixprec.numerics.rounding import widened_off_by_half_ulp

# The number of times to round the predictions at random, which shows how much
# the float32 metric varies.
_WAYS = 2


def metric_findings(
    model: keras.Model,
    batch: tuple,
    predictions: Any,
    step: int | None = None,
) -> list[Finding]:
    """Returns a finding for each metric that float32 computes differently.

    Args:
        model: A built and compiled `keras.Model`.
        batch: Tuple `(x, y, sample_weight)` of tensors.
        predictions: The model's predictions for `x`.
        step: Int. The number of steps taken so far. Defaults to `None`.

    Returns:
        List of `Finding`, with the loss last.
    """
    floats = [x for x in tree.flatten(predictions) if is_float(x)]
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in floats}
    narrow = sorted(dtypes & {*SIXTEEN_BITS})
    if not narrow:
        return []

    def measured(change):
        changed = tree.map_structure(
            lambda leaf: change(leaf) if is_float(leaf) else leaf, predictions
        )
        return _values(model, batch, changed)

    value = measured(lambda leaf: leaf)
    exact = measured(lambda leaf: ops.cast(leaf, "float32"))
    moved = [
        measured(lambda leaf, r=random: widened_off_by_half_ulp(leaf, r))
        for random in map(np.random.default_rng, range(_WAYS))
    ]
    return [
        _finding(name, value[name], known, narrow[0], step)
        for name, known in exact.items()
        if math.isfinite(known)
        if not abs(value[name] - known) <= _allowed(name, known, moved)
    ]


def _finding(name, value, exact, dtype, step):
    numbers = {
        "metric": name,
        "value": value,
        "in_float32": exact,
        "dtype": dtype,
    }
    text = advice("metric_error", **numbers)
    verdict = Verdict("metric_error", step=step, numbers=numbers, advice=text)
    return Finding(verdict, [])


def _allowed(name, exact, moved):
    """Returns the limit of the error, which is above the float32 noise."""
    noise = max(abs(values[name] - exact) for values in moved)
    least = thresholds.METRIC_ERROR * abs(exact)
    return max(least, thresholds.BEYOND_NOISE * noise)


def _values(model, batch, predictions):
    x, y, sample_weight = batch
    with np.errstate(all="ignore"), leaving_no_trace(model):
        # Call `reset_metrics` of the class. The monitor wraps the method of the
        # instance, and takes a call to the wrapper for the end of an epoch.
        type(model).reset_metrics(model)
        logs = model.compute_metrics(x, y, predictions, sample_weight)
        # Drop the running mean of losses, because no step has updated the mean.
        logs = {k: v for k, v in logs.items() if k != "loss"}
        if compiled_loss(model) is not None:
            logs["loss"] = model.compute_loss(
                x, y, predictions, sample_weight, training=False
            )
    return {
        name: float(ops.convert_to_numpy(ops.cast(value, "float32")))
        for name, value in logs.items()
        if getattr(value, "shape", ()) == ()
    }
