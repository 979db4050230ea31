"""Runs `train_step` without updates, and records calls and gradients."""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_mixprec.backend import active
from keras_mixprec.backend.common import naming_exhaustion, optimizers_of
from keras_mixprec.keras_internals import stored_value
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import (
    CallRecorder,
    Interrupted,
    LayerCall,
    ending_pieces,
    interruption,
)
from keras_mixprec.numerics.held_optimizer import Held, scale_variables
from keras_mixprec.numerics.random_numbers import Draws, exact_run
from keras_mixprec.numerics.untouched import untouched
from keras_mixprec.policies.layers import walk_with_model

_BY_HAND = contextvars.ContextVar("by_hand", default=False)


class NotBuiltError(ValueError):
    """Raised if a model is not built, and only training can build it."""


class DryStep(NamedTuple):
    """The results of a train step that updated nothing.

    Attributes:
        loss: Float. The sum of all losses, unscaled.
        gradients: Dict from `id(variable)` to the scaled gradient.
        calls: List of `LayerCall`, innermost first, in the order they ended.
        scale: Float. The loss scale, or 1 if the user's own `train_step` does
            not scale the loss.
        scales: Boolean, whether the step scales the loss.
        state: Dict from `id(variable)` to the new value of each non-trainable
            variable that the step sets, such as a moving average.
        draws: List of `Draw`, the random numbers in the order drawn.
    """

    loss: float
    gradients: dict
    calls: list[LayerCall]
    scale: float
    scales: bool = True
    state: dict = {}
    draws: list = []


def dry_step(
    model: keras.Model,
    data,
    scale: float,
    *,
    records: bool = True,
    how: str = "again",
    drawing: Draws | None = None,
) -> DryStep:
    """Runs the model's own `train_step` once, with the optimizers held.

    Weights, optimizers, metrics and random state do not change.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        scale: Float. Replaces the loss scale of every optimizer.
        records: Boolean, whether to record layer calls. The record keeps all
            activations in memory. Defaults to `True`.
        how: String, for a step without a record. `"again"` is cheapest if other
            dtypes follow, and `"once"` if the step is not repeated. `"xla"`
            compiles the step with XLA. Defaults to `"again"`.
        drawing: `Draws` that records the random numbers. Defaults to `None`, a
            new one.
    """
    entries = walk_with_model(model)
    recorder = CallRecorder(entries if records else [])
    taken: Any = None
    tensors: Any = None
    drawing = drawing or Draws()

    def observing():
        if records:
            return recorder.recording()
        return ending_pieces(entries if how == "again" else [])

    def run(given):
        nonlocal taken, tensors
        data, factor = given
        with observing():
            taken = run_held(model, data, lambda _: factor, drawing)
        losses, gradients, _, _, state = taken
        own = [*losses, *gradients.values()]
        others = [*state.values(), *recorder.tensors()]
        tensors = [*own, *others]
        return [*map(keras.ops.convert_to_tensor, own), *others]

    replay = active.replay()
    # Pass the loss scale as a tensor, so that JAX compiles one program for all
    # loss scales.
    given = data, keras.ops.convert_to_tensor(scale, "float32")
    with restored(model):
        if how == "xla":
            found = replay.compiled(lambda _: run((data, scale)))([])
        else:
            found = replay.run_once(model, run, given)
    # The tensors of a traced step have no values, so find each value by the id
    # of its tensor.
    values = dict(zip(map(id, tensors), found, strict=True))
    recorder.put_values(values)
    losses, gradients, _, scales, state = taken
    losses = _known(values, dict(enumerate(losses))).values()
    return DryStep(
        # Sum over all samples, because user code may scale the losses of
        # samples before it averages them.
        float(sum(to_array(loss).sum() for loss in losses)),
        _known(values, gradients),
        recorder.calls,
        scale if scales else 1.0,
        scales,
        _known(values, state),
        drawing.made,
    )


def _known(values, tensors):
    """Returns the known values of some tensors, by the same keys."""
    found = {key: values[id(tensor)] for key, tensor in tensors.items()}
    return {key: value for key, value in found.items() if value is not None}


def interrupted(model: keras.Model, data) -> Interrupted | None:
    """Returns where a step at loss scale 1 raises, or `None` if it does not.

    Args:
        model: As for `dry_step`.
        data: As for `dry_step`.
    """
    with restored(model):
        return interruption(model, lambda: run_held(model, data, lambda _: 1.0))


# A loss scale at which no gradient overflows in 16 bits. The scale must not be
# 0, because code divides by the scale.
_LEAST_SCALE = 2.0**-100


@contextlib.contextmanager
def step_held_at(model: keras.Model, data, scale: float = _LEAST_SCALE):
    """Context manager that yields a function to run the step.

    The function suits `each_operation`. It ignores its argument, a list, and
    returns losses and gradients.

    Args:
        model: As for `dry_step`.
        data: As for `dry_step`.
        scale: As for `dry_step`. Defaults to a tiny scale, at which no gradient
            overflows.
    """

    def run(_):
        losses, gradients, *_ = run_held(model, data, lambda _: scale)
        return [
            *map(keras.ops.convert_to_tensor, (*losses, *gradients.values()))
        ]

    with restored(model):
        yield run


def run_held(
    model: keras.Model, data, scale_of: Callable, drawing: Draws | None = None
) -> tuple:
    """Runs the model's `train_step` with its optimizers held.

    Call this function within `untouched(model)`.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        scale_of: Function of an optimizer that returns its loss scale. The step
            also reads this scale from the optimizer's variable.
        drawing: `Draws` that records the random numbers. Defaults to `None`, a
            new one.

    Returns:
        Tuple of five:

        - List of the losses that the step scales, without the loss scale. If
          the step scales none, list of the losses that the step returns.
        - Dict from `id(variable)` to the scaled gradient.
        - Dict from `id(variable)` to the loss scale of its optimizer.
        - Boolean, whether the step scaled the loss.
        - Dict, the `state` of `DryStep`.
    """
    held = Held(scale_of)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held.holding())
        stack.enter_context(
            active.undo().telling(functools.partial(held.stepped, model))
        )
        stack.enter_context((drawing or Draws()).active())
        scope = _AsInFit(collect_losses=True)
        for optimizer in optimizers_of(model).values():
            scale = keras.ops.cast(scale_of(optimizer), "float32")
            scope.state_mapping |= {
                id(v): scale for v in scale_variables(optimizer)
            }
        # A regularizer reads its variable from the `StatelessScope`. Put the
        # stored value into the scope, because a new tensor made from the value
        # would get no gradient.
        scope.state_mapping |= {
            id(v): stored_value(v)
            for v in model.trainable_variables
            if v.regularizer
        }
        given = set(scope.state_mapping)
        stack.enter_context(scope)
        # Reset metrics so that the step returns values of this batch alone.
        # Call the method of the class, because the monitor wraps the method of
        # the instance and takes a call to the wrapper for the end of an epoch.
        type(model).reset_metrics(model)
        with naming_exhaustion():
            returned = active.replay().train_step(model, data)
    losses, gradients, scales = held.taken()
    scaled = bool(losses) or _BY_HAND.get()
    losses = losses or logged_losses(returned)
    return losses, gradients, scales, scaled, _written(model, scope, given)


class _AsInFit(keras.StatelessScope):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._put_back = []

    def add_update(self, update):
        replay = active.replay()
        if replay.loses_assignment(update[0]):
            return
        if put_back := replay.assigned(*update):
            self._put_back.append(put_back)
        else:
            super().add_update(update)

    def __exit__(self, *args, **kwargs):
        for put_back in reversed(self._put_back):
            put_back()
        super().__exit__(*args, **kwargs)


def logged_losses(logs) -> list:
    """Returns the losses that a `train_step` returns."""
    if not isinstance(logs, dict):
        return []
    own = {name: x for name, x in logs.items() if name.endswith("loss")}
    return [own["loss"]] if "loss" in own else [*own.values()]


def _written(model, scope, given):
    """Returns the variables that a step has set without an optimizer.

    The result leaves out the loss scale, even if it is a variable of the model.
    """
    return {
        id(v): scope.state_mapping[id(v)]
        for v in model.non_trainable_variables
        if id(v) in scope.state_mapping and id(v) not in given
    }


single_step = functools.partial(dry_step, records=False, how="once")
compiled_step = functools.partial(dry_step, records=False, how="xla")


def exact_step(
    model: keras.Model, data, scale: float = 1.0, *, records=True
) -> DryStep:
    """Runs the step in float32, with the random numbers of the 16-bit step.

    Args:
        model: As for `dry_step`.
        data: As for `dry_step`.
        scale: As for `dry_step`. Defaults to 1.
        records: As for `dry_step`.
    """
    run = functools.partial(dry_step, model, data, scale)
    return exact_run(model, run, records=records)


@contextlib.contextmanager
def scaled_by_hand(scaled: bool):
    """Context for steps that scale the loss without calling `scale_loss`."""
    token = _BY_HAND.set(scaled)
    try:
        yield
    finally:
        _BY_HAND.reset(token)


@contextlib.contextmanager
def restored(model: keras.Model):
    """Context manager that restores everything that a step changes."""
    with naming_exhaustion(), untouched(model):
        yield
