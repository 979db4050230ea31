"""Runs `train_step` and updates nothing; records calls and gradients."""

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
    """A model is not built, and only its training can build it."""


class DryStep(NamedTuple):
    """The results of a train step that updated nothing.

    Attributes:
        loss: Float. The sum of all losses, unscaled.
        gradients: Dict from `id(variable)` to the scaled gradient.
        calls: List of `LayerCall`, innermost first, in the order they ended.
        scale: Float. The loss scale; 1 if a `train_step` of the user's own
            does not multiply the loss by it.
        scales: Boolean, whether it does.
        state: Dict from `id(variable)` to what the step has set a variable to
            that is not trained, such as a moving average.
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

    Weights, optimizers, metrics and random state are as before afterwards.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        scale: Float. Takes the place of every optimizer's loss scale.
        records: Boolean, whether to record the calls of layers, which hold all
            activations. Defaults to `True`.
        how: String. Without a record, `"again"` costs least if the step is
            repeated in other dtypes, `"once"` if it is not; `"xla"` computes
            it as XLA does. Defaults to `"again"`.
        drawing: `Draws`, which keeps a record of the random numbers. Defaults
            to `None`, a new one.
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
    # So that on JAX each scale is the same program.
    given = data, keras.ops.convert_to_tensor(scale, "float32")
    with restored(model):
        if how == "xla":
            found = replay.compiled(lambda _: run((data, scale)))([])
        else:
            found = replay.run_once(model, run, given)
    # Tensors of a traced step had no values.
    values = dict(zip(map(id, tensors), found, strict=True))
    recorder.put_values(values)
    losses, gradients, _, scales, state = taken
    losses = _known(values, dict(enumerate(losses))).values()
    return DryStep(
        # Some scale the losses of samples, and average them after that.
        float(sum(to_array(loss).sum() for loss in losses)),
        _known(values, gradients),
        recorder.calls,
        scale if scales else 1.0,
        scales,
        _known(values, state),
        drawing.made,
    )


def _known(values, tensors):
    """The values of tensors that are known."""
    found = {key: values[id(tensor)] for key, tensor in tensors.items()}
    return {key: value for key, value in found.items() if value is not None}


def interrupted(model: keras.Model, data) -> Interrupted | None:
    """Runs the step at loss scale 1. Returns where it raises, if it does.

    Args:
        model: As for `dry_step`.
        data: As for `dry_step`.
    """
    with restored(model):
        return interruption(model, lambda: run_held(model, data, lambda _: 1.0))


# No gradient overflows in 16 bits at this scale. It is not 0, because code
# divides by it.
_LEAST_SCALE = 2.0**-100


@contextlib.contextmanager
def step_held_at(model: keras.Model, data, scale: float = _LEAST_SCALE):
    """Context with a function that runs the step, for `each_operation`.

    It maps an ignored list to losses and gradients.

    Args:
        model: As for `dry_step`.
        data: As for `dry_step`.
        scale: As for `dry_step`. Defaults to a scale that makes cotangents
            vanish.
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
    """Lets the model take the step, with its optimizers held.

    Within `untouched(model)`.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        scale_of: Function of an optimizer that returns its loss scale. The step
            also reads this scale from the optimizer's variable.
        drawing: `Draws`, which keeps a record of the random numbers. Defaults
            to `None`, a new one.

    Returns:
        Tuple of five: a list of the losses, or of those that the step returns
        if it scales none; a dict from `id(variable)` to the scaled gradient; a
        dict from it to the loss scale of its optimizer; whether the step
        multiplied the losses by the loss scale; the `state` of `DryStep`.
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
        # The scope gives a regularizer its variable. It must be the stored
        # value: no gradient leads back from a tensor made of it.
        scope.state_mapping |= {
            id(v): stored_value(v)
            for v in model.trainable_variables
            if v.regularizer
        }
        given = set(scope.state_mapping)
        stack.enter_context(scope)
        # Within the scope: what it returns shall be of this batch alone, and a
        # `fit` that raised may leave metrics without values. Not by what guards
        # them, which would take it for the end of an epoch.
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
    """The values of variables that a step has set without an optimizer.

    A model may hold the loss scale, which the step is given.
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
    """Context of steps that multiply the loss without calling `scale_loss`."""
    token = _BY_HAND.set(scaled)
    try:
        yield
    finally:
        _BY_HAND.reset(token)


@contextlib.contextmanager
def restored(model: keras.Model):
    """Context after which all that a step changes is as before."""
    with naming_exhaustion(), untouched(model):
        yield
