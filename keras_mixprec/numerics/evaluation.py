"""Measures a model's metric on held-back data, with layers in other dtypes."""

import contextlib
import functools
import math
import numbers
import random
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import check_choice
from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import naming_exhaustion
from keras_mixprec.keras_internals import (
    better_end,
    flat_layers,
    global_seed_generator,
)
from keras_mixprec.numerics.arrays import restoring
from keras_mixprec.numerics.layer_hooks import (
    computing_in,
    temporary_policies,
    with_sublayers,
)

_MODES = ("auto", "min", "max")

_FORMS = (
    "must be `(x_val, y_val)`, `(x_val, y_val, sample_weight)`, a finite "
    "dataset for `model.evaluate` that can be read repeatedly, or a function "
    "of the model that returns a number"
)


class HeldBack:
    """Held-back data, and the metric to evaluate on them.

    Args:
        validate: Tuple `(x_val, y_val)` or `(x_val, y_val, sample_weight)`, a
            dataset that can be read repeatedly, or a function of the model
            that returns a number.
        monitor: String. The name of the metric, as for `EarlyStopping`.
        mode: String. `"min"` if smaller is better, `"max"` if larger is. With
            `"auto"`, Keras decides for the metrics that it knows, and any
            change of a custom metric counts as worse.
        argument: String. The caller's name for `validate`.

    Raises:
        TypeError: If `validate` has an unsupported type.
        ValueError: If the data can be read only once or have no end, or if
            `mode` is unknown.
    """

    def __init__(
        self, validate: Any, monitor: str, mode: str, argument: str = "validate"
    ):
        if not isinstance(monitor, str):
            raise TypeError(
                "`monitor` must be the name of a metric. "
                f"Received: monitor={monitor!r} of type "
                f"{type(monitor).__name__}"
            )
        self._mode = check_choice("mode", mode, _MODES)
        self._argument = argument
        self._parts: tuple = ()
        self._function: Any = None
        self._metric = monitor.removeprefix("val_")
        self.name = f"val_{self._metric}"
        if _is_function(validate):
            self._function = validate
            self.name = getattr(validate, "__name__", type(validate).__name__)
            self.name = self.name.replace("<lambda>", argument)
        else:
            self._parts = _parts_of(argument, validate)

    def measure(self, model: keras.Model) -> float:
        """Returns the metric of the model with its current dtypes.

        Raises:
            TypeError: If the function does not return a number.
            ValueError: If the model has no such metric.
        """
        if self._function is not None:
            return self._number(self._function(model))
        logs = model.evaluate(
            self._parts[0],
            *self._parts[1:2],
            sample_weight=self._parts[2] if len(self._parts) > 2 else None,
            verbose=0,
            return_dict=True,
        )
        if self._metric not in logs:
            raise ValueError(
                f"`monitor` must be a metric of the model, one of "
                f"{', '.join(repr(f'val_{name}') for name in logs)}. "
                f"Received: monitor={self.name!r}"
            )
        # Decide the mode after the call to `model.evaluate`, which may have
        # built the metrics.
        if self._mode == "auto":
            self._mode = better_end(model, self.name)
        return self._number(logs[self._metric])

    def worse_by(self, value: float, reference: float) -> float:
        """Returns how much worse a value of the metric is than a reference.

        Args:
            value: Float from `measure`.
            reference: Float from `measure`.

        Returns:
            Float, negative if the value is better. Infinite if either number
            is not finite.
        """
        if not math.isfinite(value) or not math.isfinite(reference):
            return math.inf
        sign = {"min": 1, "max": -1}.get(self._mode)
        difference = value - reference
        return abs(difference) if sign is None else sign * difference

    def _number(self, value):
        with contextlib.suppress(TypeError, ValueError):
            if ops.is_tensor(value):
                value = ops.convert_to_numpy(value)
            if getattr(value, "size", None) == 1:
                value = value.item()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(
                f"`{self._argument}` must return a number. To choose one of "
                f"several metrics, pass `{self._argument}=(x_val, y_val)` and "
                f"`monitor`. Received: {value!r} of type {type(value).__name__}"
            )
        return float(value)


def _is_function(validate):
    return callable(validate) and not hasattr(validate, "__getitem__")


def _parts_of(argument, validate):
    """Returns the arguments for `model.evaluate` as a tuple."""
    if isinstance(validate, tuple | list) and len(validate) in (2, 3):
        return tuple(validate)
    readable = hasattr(validate, "__iter__") or hasattr(validate, "__getitem__")
    of_type = readable and not isinstance(validate, str | bytes | dict)
    is_read_once = hasattr(validate, "__next__")
    is_endless = getattr(validate, "cardinality", lambda: 0)() == -1
    is_part = isinstance(validate, tuple | list) or hasattr(validate, "shape")
    if of_type and not (is_read_once or is_endless or is_part):
        return (validate,)
    error = ValueError if of_type else TypeError
    raise error(
        f"`{argument}` {_FORMS}. Received: {argument}={_shown(validate)}"
    )


def _shown(value):
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{repr(value)[:100]} of type {type(value).__name__}"


def held_back(
    validate: Any, monitor: str, mode: str, argument: str = "validate"
) -> HeldBack | None:
    """Returns a `HeldBack`, or `None` if there are no held-back data.

    Args:
        validate: As for `HeldBack`, or `None`.
        monitor: As for `HeldBack`.
        mode: As for `HeldBack`.
        argument: As for `HeldBack`.

    Raises:
        ValueError: If `monitor` or `mode` is set without `validate`.
    """
    if validate is not None:
        return HeldBack(validate, monitor, mode, argument)
    if (monitor, mode) != ("val_loss", "auto"):
        raise ValueError(
            f"`monitor` and `mode` need held-back data: pass `{argument}`. "
            f"Received: monitor={monitor!r}, mode={mode!r}, {argument}=None"
        )
    return None


class Evaluation:
    """Evaluates one model in several dtypes, with its current weights.

    An evaluation may happen during `fit`. It restores weights, optimizers,
    metrics, the state of layers, random numbers and compiled functions. Each
    evaluation draws the same random numbers.

    Args:
        model: A built and compiled `keras.Model`. On JAX its variables must
            hold their current values.
        held_back: `HeldBack`.

    Attributes:
        held_back: As given.
    """

    def __init__(self, model: keras.Model, held_back: HeldBack):
        self.held_back = held_back
        self._model = model
        # The compiled float32 functions, kept for later evaluations.
        self._in_float32: dict = {}

    def in_float32(self) -> float:
        """Returns the metric with all layers in float32."""
        with computing_in("float32", with_sublayers(self._model)):
            return self._measured(self._in_float32)

    def reference(self) -> float:
        """Returns the metric in float32, as the reference for other dtypes.

        Raises:
            ValueError: If it is not finite.
        """
        value = self.in_float32()
        if not math.isfinite(value):
            raise ValueError(
                "The metric is not finite in float32, so precision is not the "
                f"cause. Received: {self.held_back.name} is {value:g}"
            )
        return value

    def with_policies(self, assignment: dict) -> float:
        """Returns the metric with other policies for some layers.

        Args:
            assignment: Dict from policy name to the list of layers that get
                the policy. All other layers keep theirs.
        """
        with temporary_policies(assignment):
            return self._measured({})

    def worse_by(self, value: float, reference: float) -> float:
        """Returns the result of `HeldBack.worse_by`."""
        return self.held_back.worse_by(value, reference)

    def _measured(self, functions):
        with (
            np.errstate(all="ignore"),
            naming_exhaustion(),
            leaving_no_trace(self._model),
            _compiled_apart(self._model, functions),
        ):
            return self.held_back.measure(self._model)


@contextlib.contextmanager
def leaving_no_trace(model: keras.Model):
    """Context manager that restores everything that an evaluation changes.

    Args:
        model: A `keras.Model`, compiled or not.
    """
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    seeds = global_seed_generator()
    if seeds is not None:
        variables.append(seeds.state)
    variables = list({id(v): v for v in variables}.values())
    # The dataset may use the global generators of Python and NumPy, for example
    # to shuffle.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with restoring(variables), active.replay().evaluating(model):
            try:
                yield
            finally:
                # Reset metrics that the evaluation has built. Call the method
                # of the class, because the monitor wraps the method of the
                # instance and takes a call to the wrapper for the end of an
                # epoch.
                type(model).reset_metrics(model)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


_KINDS = ("test", "predict")


@contextlib.contextmanager
def _compiled_apart(model, functions):
    """Context that gives a model separate compiled functions to evaluate with.

    The model's own functions would still use the dtypes that they were traced
    with.

    Args:
        model: The `keras.Model`.
        functions: Dict of compiled functions to use. New ones are added.
    """
    places = [
        (layer, f"{kind}_function")
        for layer in flat_layers(model)
        for kind in _KINDS
        if hasattr(layer, f"{kind}_function")
    ]
    before = [getattr(layer, name) for layer, name in places]
    with contextlib.ExitStack() as stack:
        for layer, name in places:
            setattr(layer, name, functions.get((id(layer), name)))
            step = f"{name.partition('_')[0]}_step"
            stack.enter_context(patched(layer, {step: _new_step(layer, step)}))
        try:
            yield
        finally:
            for (layer, name), own in zip(places, before, strict=True):
                functions[id(layer), name] = getattr(layer, name)
                setattr(layer, name, own)


def _new_step(model, name):
    """Returns a copy of a step, so that JAX does not reuse an old trace."""
    step = getattr(model, name)

    @functools.wraps(step)
    def new_step(*args, **kwargs):
        return step(*args, **kwargs)

    return new_step
