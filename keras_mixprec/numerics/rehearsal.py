"""Takes real train steps, and undoes them."""

import contextlib
import math
import types
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import (
    all_variables,
    build_optimizer,
    optimizers_of,
)
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import (
    at_learning_rate,
    has_replicas,
    holding,
    innermost,
    parts_of,
    set_value,
    stored_value,
)
from keras_mixprec.numerics.arrays import (
    count_nonfinite,
    restoring,
    to_array,
)
from keras_mixprec.numerics.dry_step import logged_losses, restored, single_step
from keras_mixprec.numerics.held_optimizer import is_scaling, scale_variables
from keras_mixprec.numerics.layer_hooks import in_float32
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.numerics.untouched import PythonState


class StepTaker:
    """Lets a model take train steps.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        optimizers: List of all optimizers that the model holds.
        scaling: Dict from `id(optimizer)` to each optimizer that scales the
            loss.
    """

    def __init__(self, model: keras.Model):
        self.optimizers = PythonState(model).all_of(keras.optimizers.Optimizer)
        wrapper = keras.optimizers.LossScaleOptimizer
        found = [o for o in self.optimizers if isinstance(o, wrapper)]
        self.scaling = {id(o): o for o in found}
        self._model = model
        self._traced: list = []
        self._python = PythonState(model)

    def can_take(self) -> bool:
        """Returns whether the model can take steps.

        There are three obstacles. An optimizer is not built yet, and would be
        built within the step. Several replicas train, and would wait for each
        other. Or trainable variables have 16 bits, and TensorFlow's optimizers
        do not know the widened copies of such variables.
        """
        model, scaling = self._model, self.scaling
        narrow = any(v.dtype in SIXTEEN_BITS for v in model.trainable_variables)
        return (
            all(
                o.built and (id(o) in scaling or not is_scaling(o))
                for o in self.optimizers
            )
            and not narrow
            and active.processes().workers(model) == 1
            and not has_replicas(model)
        )

    @property
    def ours(self) -> dict:
        """The optimizers in `scaling` that record a history, like ours."""
        return {
            key: optimizer
            for key, optimizer in self.scaling.items()
            if hasattr(optimizer, "history")
        }

    @contextlib.contextmanager
    def undone(self):
        """Context that undoes all steps."""
        known = all_variables(self._model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self._model))
            stack.enter_context(active.undo().telling(lambda _: None))
            values = [stored_value(v) for v in known]
            stack.enter_context(holding(known, values))
            # Use `get_metrics_result` of the class, because the monitor wraps
            # the method of the instance and reports different values if a whole
            # epoch failed.
            own = types.MethodType(
                type(self._model).get_metrics_result, self._model
            )
            results = {"get_metrics_result": own}
            stack.enter_context(patched(self._model, results))
            for optimizer in self.ours.values():
                # Tell the optimizer not to check whether the loss was scaled.
                stack.enter_context(
                    patched(optimizer._stages, {"scaling": True})
                )
                # Stop the handling of spikes, which would hide a divergence.
                if optimizer.spikes:
                    optimizer.spikes.stop()
            self._python = PythonState(self._model)
            yield

    def set_scales(self, scales: dict):
        """Sets loss scales, before a step.

        Args:
            scales: Dict from ids of optimizers to their loss scales.
        """
        variables = self.scale_variables()
        for key, scale in scales.items():
            scale = ops.convert_to_tensor(scale, "float32")
            set_value(variables[key], scale)
        # A compiled step would keep the loss scales as constants, so note their
        # values for `take` to pass in.
        values = [(v, stored_value(v)) for v in variables.values()]
        self._traced = self._traced or values

    def take(self, data) -> float:
        """Takes a step.

        Args:
            data: The batch, as `train_step` takes it.

        Returns:
            The loss that the step logs, 0 if it logs none.
        """
        written, replay = [], active.replay()

        def run(data):
            logs, written[:] = replay.take_step(self._model, data, self._traced)
            losses = [*map(ops.convert_to_tensor, logged_losses(logs))]
            return [value for _, value in written] + losses

        # Reset the metrics, because they would add the losses of earlier steps.
        type(self._model).reset_metrics(self._model)
        try:
            values = replay.run_once(self._model, run, data)
        finally:
            if not _is_eager(self._model):
                # Tracing has run the model's Python code, so restore the state
                # of that code.
                self._python.put_back()
        for (variable, _), value in zip(written, values, strict=False):
            if value is not None:
                set_value(variable, value)
        losses = [x for x in values[len(written) :] if x is not None]
        return float(sum(to_array(x).sum() for x in losses))

    def read(self, name: str) -> dict:
        """Returns the records of optimizers, by id and name.

        Args:
            name: String. An attribute of their `history`.
        """
        return {
            (key, name): to_array(getattr(o.history, name).value) + 0
            for key, o in self.ours.items()
        }

    def scale_variables(self) -> dict:
        """Returns the loss scale variables, by the ids of optimizers."""
        return {k: scale_variables(o)[0] for k, o in self.scaling.items()}


def _is_eager(model):
    return model.run_eagerly or "eager" in active.runtime().MODES


class State(NamedTuple):
    """A copy of everything that train steps of a model change.

    Attributes:
        variables: List of the variables of the model and of the optimizers that
            update it, without the counters of loss scaling.
        values: List of arrays, the values of the variables.
    """

    variables: list
    values: list

    @classmethod
    def of(cls, model: keras.Model) -> "State":
        """Returns a copy of a model's current state."""
        # Build the optimizer now, because TensorFlow would build it only in the
        # first step.
        build_optimizer(model)
        found = _written(model)
        # Copy the values, because torch and TensorFlow may return arrays that
        # share the memory of a variable.
        values = [np.array(active.step().read(v)) for v in found]
        return cls(found, values)

    @property
    def is_finite(self) -> bool:
        """Returns whether all numbers in the state are finite."""
        floats = (x for x in self.values if x.dtype.kind not in "iub")
        return all(np.isfinite(x.astype("float32")).all() for x in floats)

    def put_back(self):
        """Assigns the values to the variables."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)

    @contextlib.contextmanager
    def in_place(self):
        """Context manager that assigns the values to the variables."""
        with restoring(self.variables):
            self.put_back()
            yield


def size_of_state(model: keras.Model) -> int:
    """Returns the size of a model's `State` in bytes."""
    return 4 * sum(math.prod(v.shape) for v in _written(model))


def _written(model):
    found = list(model.variables)
    for optimizer in optimizers_of(model).values():
        found += innermost(optimizer).variables
    return [*{id(v): v for v in found}.values()]


class Change(NamedTuple):
    """A change to the usual steps, for a rehearsal.

    Attributes:
        rate: Float. The factor for all learning rates.
        clip: Float. The global norm to clip gradients to, or `None`.
    """

    rate: float = 1.0
    clip: float | None = None


NO_CHANGE = Change()


class Rehearsal(NamedTuple):
    """The results of steps that were taken and undone.

    Attributes:
        first: List of floats. The loss of each batch before any step.
        losses: List of floats. The loss of each step.
        is_finite: Boolean, whether all losses and gradients were finite.
    """

    first: list
    losses: list
    is_finite: bool

    @property
    def growth(self) -> float:
        """The growth of the total loss, as a share of the first total loss.

        The growth is infinite if a loss or a gradient is not finite.
        """
        return self._growth(sum(self.losses[-len(self.first) :]))

    @property
    def peak(self) -> float:
        """The largest growth of a loss during the steps, as for `growth`.

        The loss may have fallen again since.
        """
        return self._growth(max(self.losses) * len(self.first))

    def _growth(self, loss):
        if not self.is_finite:
            return math.inf
        first = sum(self.first)
        return (loss - first) / max(abs(first), 1e-30)


def updating(model: keras.Model) -> list:
    """Returns the innermost optimizers of a model, which update variables."""
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
    """Takes real train steps in float32, and undoes them.

    The rehearsal ends early if a loss or a gradient is not finite.

    Args:
        model: A built and compiled `keras.Model`, in the state to start from.
        batches: List of batches, as `train_step` takes them. They take turns.
        steps: Int. The number of times to train on each batch.
        rates: Dict of learning rates, as from `rates_of`.
        change: `Change`. Defaults to none.
    """
    taker, losses = StepTaker(model), []
    if not taker.can_take():
        return Rehearsal([math.nan], [math.nan], False)
    scales = dict.fromkeys(taker.scaling, 1.0)
    with (
        active.processes().single_process(model),
        same_draws(),
        np.errstate(all="ignore"),
        in_float32(model),
        _at(model, rates, change),
        taker.undone(),
    ):
        first = [single_step(model, b, 1.0).loss for b in batches[1:]]
        for batch in batches * steps:
            taker.set_scales(scales)
            overflows = _overflows(taker)
            try:
                losses.append(taker.take(batch))
            except active.replay().REFUSALS:  # A torch loss may refuse NaN.
                losses.append(math.nan)
            if not math.isfinite(losses[-1]) or _overflows(taker) > overflows:
                return Rehearsal([losses[0], *first], losses, False)
        weights = [to_array(v.value) for v in model.trainable_variables]
    is_finite = not any(map(count_nonfinite, weights))
    return Rehearsal([losses[0], *first], losses, is_finite)


def _overflows(taker):
    """Returns the number of overflows that the optimizers have noticed."""
    own = taker.read("overflows").values()
    scales = [to_array(v.value) for v in taker.scale_variables().values()]
    return sum(x.sum() for x in own) + sum(x < 1 for x in scales)


def _at(model, rates, change) -> contextlib.ExitStack:
    """Returns a context that sets learning rates, and may clip gradients."""
    with contextlib.ExitStack() as stack:
        for optimizer in updating(model):
            rate = rates[id(optimizer)] * change.rate
            rate = keras.ops.convert_to_tensor(rate)
            stack.enter_context(at_learning_rate(optimizer, rate))
            if change.clip is not None:
                own = {"global_clipnorm": change.clip}
                stack.enter_context(patched(optimizer, own))
        return stack.pop_all()
