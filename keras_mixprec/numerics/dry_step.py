"""A train step that shows everything and changes nothing."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import keras

from keras_mixprec.backend import replay as backend_replay
from keras_mixprec.backend import step as backend_step
from keras_mixprec.backend.model_state import all_variables, optimizers_of
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import CallRecorder, LayerCall
from keras_mixprec.numerics.dtypes import computing_in, with_sublayers
from keras_mixprec.numerics.random_numbers import DROPOUT, Draws
from keras_mixprec.policies.layers import walk_with_model


class DryStep(NamedTuple):
    """What a train step would have done.

    Attributes:
        loss: Float. The sum of all losses, unscaled.
        gradients: Dict from `id(variable)` to the scaled gradient.
        calls: List of `LayerCall`, innermost first, in the order they ended.
        scale: Float. The loss scale.
        draws: List of `Draw`, the random numbers in the order drawn.
    """

    loss: float
    gradients: dict
    calls: list[LayerCall]
    scale: float
    draws: list = []


def dry_step(
    model: keras.Model, data, scale: float, known=(), draws=()
) -> DryStep:
    """Runs the model's own `train_step` once, with the optimizers held.

    Weights, optimizers, metrics and random state are as before afterwards.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        scale: Float. Takes the place of every optimizer's loss scale.
        known: Dict from names to `LayerCall`s of the exact step, as for
            `CallRecorder`; a `train_step` of the user's own, the loss of which
            may contain gradients, gets those that are. Defaults to none.
        draws: List of `Draw`, of the model as it is. Defaults to none, random
            numbers of the dtype that each layer asks for now.
    """
    if _has_own_step(model):
        known = ()
    recorder = CallRecorder(walk_with_model(model), known, scale)
    drawing = Draws(draws)
    with restored(model), recorder.recording():
        losses, gradients = run_held(model, data, lambda _: scale, drawing)
    concrete = filter(backend_replay.current().is_concrete, losses)
    return DryStep(
        _total(concrete), gradients, recorder.calls, scale, drawing.made
    )


def compiled_loss(model: keras.Model, data, draws=()) -> float:
    """Returns the loss of the step as XLA computes it, compiled as a whole.

    Which may be right where single operations are not: an average over
    128 x 128 float16 pixels is off by 30% to 90% on TensorFlow, by .04% in XLA.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        draws: List of `Draw`, as for `dry_step`.
    """

    def losses(_):
        return run_held(model, data, lambda _: 1.0, Draws(draws))[0]

    with restored(model):
        return _total(backend_replay.current().compiled(losses)([]))


def run_held(
    model: keras.Model, data, scale_of: Callable, drawing: Draws | None = None
) -> tuple:
    """Lets the model take the step, with its optimizers held.

    Within `restored(model)`.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        scale_of: Function of an optimizer that returns its loss scale.
        drawing: `Draws`, which draws the random numbers. Defaults to `None`,
            numbers of the dtype that each layer asks for.

    Returns:
        List of the losses, and a dict from `id(variable)` to the scaled
        gradient.
    """
    losses, gradients = [], {}
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model).values():
            scale = scale_of(optimizer)
            stack.enter_context(held(optimizer, scale, losses, gradients))
        stack.enter_context((drawing or Draws()).active())
        scope = keras.StatelessScope(collect_losses=True)
        # A regularizer is given what the scope knows of its variable. As it
        # is, not as a tensor, which no gradient would lead back from.
        scope.state_mapping |= {
            id(v): v._value for v in model.trainable_variables if v.regularizer
        }
        stack.enter_context(scope)
        backend_replay.current().train_step(model, data)
    return losses, gradients


def _total(losses):
    return float(sum(to_array(loss) for loss in losses))


def exact_step(model: keras.Model, data, draws=None) -> DryStep:
    """Runs the step in float32 throughout, at loss scale 1.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        draws: List of `Draw`, those of the model as it is. Defaults to `None`:
            if there are any, a step of the model as it is shows them.
    """
    if draws is None:
        exact = exact_step(model, data, ())
        if all(draw.name == DROPOUT for draw in exact.draws):
            return exact
        draws = dry_step(model, data, 1.0).draws
    with computing_in("float32", with_sublayers(model)):
        return dry_step(model, data, 1.0, draws=draws)


@contextlib.contextmanager
def held(optimizer, scale, losses, gradients):
    """Lets an optimizer see losses and gradients, and do nothing."""
    backend, step = backend_replay.current(), backend_step.current()
    unscaled = []

    def scale_loss(loss):
        loss = keras.ops.cast(loss, "float32")
        return backend.observe(loss, losses.append, lambda _: None) * scale

    def unscale(grads):
        unscaled.append(True)
        return times(grads, 1.0 / scale)

    def times(grads, factor):
        grads = list(grads)
        return step.unscale(grads, factor, [False] * len(grads))

    def apply(grads, trainable_variables=None):
        variables = trainable_variables or optimizer._trainable_variables
        if unscaled:
            grads = times(grads, scale)
        for gradient, variable in zip(grads, variables, strict=True):
            if gradient is not None:
                gradients[id(variable)] = gradient

    def stateless_apply(optimizer_variables, grads, trainable_variables):
        apply(grads)
        return trainable_variables, optimizer_variables

    methods = {
        "scale_loss": scale_loss,
        "unscale": unscale,
        "stateless_scale_loss": lambda variables, loss: scale_loss(loss),
        "apply": apply,
        "apply_gradients": lambda pairs: apply(*zip(*pairs, strict=True)),
        "stateless_apply": stateless_apply,
        # What several optimizers that skip together go through.
        "_guard": lambda grads, variables: _HeldStep(apply, grads, variables),
    }
    vars(optimizer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(optimizer)[name]


class _HeldStep(NamedTuple):
    """Takes the place of a `GuardedStep`."""

    apply: Callable
    gradients: list
    variables: list
    finite: bool = True

    def commit(self, finite):
        self.apply(self.gradients, self.variables)


def _has_own_step(model):
    return type(model).train_step is not keras.Model.train_step


@contextlib.contextmanager
def restored(model: keras.Model):
    """Undoes what a `train_step` of the user's own may write directly."""
    if not _has_own_step(model):
        yield
        return
    variables = all_variables(model)
    before = [keras.ops.copy(v.value) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
