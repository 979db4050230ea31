"""Train steps in float32 that are taken from a state, and undone again."""

import contextlib
import math
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import (
    all_variables,
    build_optimizer,
    optimizers_of,
)
from keras_mixprec.keras_internals import (
    at_learning_rate,
    innermost,
    parts_of,
    updated_variables,
)
from keras_mixprec.numerics.arrays import restoring, to_array
from keras_mixprec.numerics.dry_step import DryStep, exact_step
from keras_mixprec.numerics.random_numbers import same_draws


class State(NamedTuple):
    """A copy of all that steps of a model write.

    Attributes:
        variables: List of variables: the model's, and those of the optimizers
            that update it. The counters of loss scaling are not among them.
        values: List of arrays, their values.
    """

    variables: list
    values: list

    @classmethod
    def of(cls, model: keras.Model) -> "State":
        """Returns a copy of the state that a model is in."""
        build_optimizer(model)  # TensorFlow does it in the first step.
        found = _written(model)
        # A copy: torch and TensorFlow may share the memory of a variable.
        values = [np.array(active.step().read(v)) for v in found]
        return cls(found, values)

    @property
    def is_finite(self) -> bool:
        """Returns whether all numbers in it are."""
        floats = (x for x in self.values if x.dtype.kind not in "iub")
        return all(np.isfinite(x.astype("float32")).all() for x in floats)

    def put_back(self):
        """Gives the variables these values."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)

    @contextlib.contextmanager
    def in_place(self):
        """Context that gives the variables these values."""
        with restoring(self.variables):
            self.put_back()
            yield


def size_of_state(model: keras.Model) -> int:
    """Returns how many bytes a `State` of a model takes."""
    return 4 * sum(math.prod(v.shape) for v in _written(model))


def _written(model):
    found = list(model.variables)
    for optimizer in optimizers_of(model).values():
        found += innermost(optimizer).variables
    return [*{id(v): v for v in found}.values()]


class Change(NamedTuple):
    """The difference of a rehearsal from the usual steps.

    Attributes:
        rate: Float. The factor of all learning rates.
        clip: Float. The norm that gradients are clipped to, together, or
            `None`.
    """

    rate: float = 1.0
    clip: float | None = None


NO_CHANGE = Change()


class Rehearsal(NamedTuple):
    """The results of steps that were taken and undone.

    Attributes:
        first: List of floats. The loss of each batch before any step.
        losses: List of floats. The loss of each step.
        is_finite: Boolean, whether all losses and gradients were.
    """

    first: list
    losses: list
    is_finite: bool

    @property
    def growth(self) -> float:
        """The growth of the loss of all batches together.

        As a share of what it was at first, infinite if a loss or a gradient is
        not finite.
        """
        return self._growth(sum(self.losses[-len(self.first) :]))

    @property
    def peak(self) -> float:
        """The largest growth of the loss of one batch, as `growth`.

        It may have come back since.
        """
        return self._growth(max(self.losses) * len(self.first))

    def _growth(self, loss):
        if not self.is_finite:
            return math.inf
        first = sum(self.first)
        return (loss - first) / max(abs(first), 1e-30)


def updating(model: keras.Model) -> list:
    """Returns the optimizers of a model that update, below all that wrap."""
    return [
        part
        for optimizer in optimizers_of(model).values()
        for part in parts_of(innermost(optimizer))
    ]


def rates_of(model: keras.Model) -> dict:
    """Returns the learning rates in use, by the ids of their optimizers."""
    return {id(o): float(to_array(o.learning_rate)) for o in updating(model)}


def rehearse(
    model: keras.Model,
    batches: list,
    steps: int,
    rates: dict,
    change: Change = NO_CHANGE,
) -> Rehearsal:
    """Takes train steps in float32, as they would be taken, and undoes them.

    Args:
        model: A built and compiled `keras.Model`, as it is to begin.
        batches: List of batches, as `train_step` takes them, which take turns.
        steps: Int. How often each batch is trained on. It ends early if a loss
            or a gradient is not finite.
        rates: Dict of learning rates, as from `rates_of`.
        change: `Change`. Defaults to none.
    """
    first, losses = [], []
    with (
        active.processes().single_process(model),
        same_draws(),
        np.errstate(all="ignore"),
        restoring(all_variables(model)),
        _at(model, rates, change.rate),
    ):
        for batch in batches[1:]:
            first.append(_step(model, batch).loss)
        for batch in batches * steps:
            step = _step(model, batch)
            norms = [_norm(to_array(x)) for x in step.gradients.values()]
            losses.append(step.loss)
            if not np.isfinite([step.loss, *norms]).all():
                return Rehearsal([losses[0], *first], losses, False)
            _take(model, step, math.hypot(*norms), change.clip)
    return Rehearsal([losses[0], *first], losses, True)


def _step(model, batch):
    try:
        return exact_step(model, batch, records=False)
    except active.replay().REFUSALS:  # A loss of torch refuses NaN.
        return DryStep(math.nan, {}, [], 1.0)


def _take(model, step, norm, clip):
    """Lets the optimizers update; layers have written their own variables."""
    for variable in model.non_trainable_variables:
        if id(variable) in step.state:
            variable.assign(step.state[id(variable)])
    factor = 1.0
    if clip is not None:
        factor = min(1.0, clip / max(norm, 1e-30))
    for optimizer in optimizers_of(model).values():
        inner = innermost(optimizer)
        own = updated_variables(inner) if inner.built else []
        own = [v for v in own if id(v) in step.gradients]
        if not own:
            continue
        gradients = [step.gradients[id(v)] for v in own]
        keep = [False] * len(own)
        gradients = active.step().unscale(gradients, factor / step.scale, keep)
        with patched(inner, {"loss_scale_factor": None}):
            inner.apply(gradients, own)


def _at(model, rates, factor) -> contextlib.ExitStack:
    """Context that fixes the learning rates of optimizers."""
    with contextlib.ExitStack() as stack:
        for optimizer in updating(model):
            rate = keras.ops.convert_to_tensor(rates[id(optimizer)] * factor)
            stack.enter_context(at_learning_rate(optimizer, rate))
        return stack.pop_all()


def _norm(gradient):
    return math.sqrt(np.square(gradient, dtype="float64").sum())
