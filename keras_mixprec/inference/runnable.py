"""Layers whose code raises in the dtypes that were planned for them."""

from typing import Any

import keras

from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.inference.storage import Assignment
from keras_mixprec.numerics.forward_pass import Prediction
from keras_mixprec.numerics.layer_hooks import CallHook, temporary_policies
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.layers import LayerEntry


def runnable(
    model: keras.Model,
    entries: list[LayerEntry],
    assignment: Assignment,
    x: Any,
) -> Assignment:
    """Returns an assignment with float32 for layers whose calls raise.

    TensorFlow and torch refuse to add float16 to float32, and some backends
    lack an operation in 16 bits. A layer that raises is widened with all that
    is inside it, or else the one that it is inside of.

    Args:
        model: A `keras.Model` in float32.
        entries: Its `LayerEntry`s.
        assignment: `Assignment`.
        x: One batch of inputs, as tensors.

    Raises:
        ValueError: If that leaves a layer that raises.
    """
    while True:
        open_paths: list[str] = []
        try:
            with (
                temporary_policies(assignment.computing(entries)),
                _innermost_first(entries, open_paths).hooked(),
                keras.StatelessScope(),
            ):
                model(x, training=False)
            return assignment
        except active.replay().REFUSALS as error:
            path = next(filter(assignment.is_narrow, open_paths), None)
            if path is None:
                raise ValueError(
                    f"The model {model.name!r} cannot be called on the "
                    f"calibration data. Received: {one_line(error, 400)}"
                ) from error
            reason = f"its code raises in 16 bits: {one_line(error)}"
            assignment = assignment.widened(path, reason)


def compilable(
    model: keras.Model,
    entries: list[LayerEntry],
    assignment: Assignment,
    x: Any,
    error: Exception,
) -> Assignment:
    """Returns an assignment with float32 for a layer that XLA cannot compile.

    On CPUs it has no attention in float16 for JAX, although each operation of
    it by itself runs.

    Args:
        model: A `keras.Model` in float32.
        entries: Its `LayerEntry`s.
        assignment: `Assignment`, with which each operation runs.
        x: One batch of inputs, as tensors.
        error: What `predict` raised.

    Raises:
        ValueError: If there is no such layer.
    """
    calls = Prediction(model, x).exact().calls
    with temporary_policies(assignment.computing(entries)):
        for call in calls:
            if not assignment.is_narrow(call.path):
                continue
            try:
                LayerReplay(call, compiled=True).forward()
            except active.replay().REFUSALS as refusal:
                reason = f"cannot be compiled in 16 bits: {one_line(refusal)}"
                return assignment.widened(call.path, reason)
    raise ValueError(
        f"The model {model.name!r} cannot be called in 16 bits. "
        f"Received: {one_line(error, 400)}"
    ) from error


def _innermost_first(entries, open_paths):
    """Collects the paths of the layers that an exception passes."""

    def call(run, layer, path, index, args, kwargs):
        try:
            return run(*args, **kwargs)
        except Exception:
            open_paths.append(path)
            raise

    return CallHook(entries, call)
