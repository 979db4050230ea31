"""Protects metrics and layer state from failed batches.

If the forward pass of one batch overflows, Keras' running means are NaN for the
rest of the epoch, even though the optimizer skips the step. `EarlyStopping`,
`ReduceLROnPlateau`, `ModelCheckpoint(save_best_only=True)` and
`TerminateOnNaN` would then react to a fault that is over.
"""

import contextvars
import functools
import math

import keras
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.backend.common import variable_scope
from keras_mixprec.backend.jax.state import pairs_of, variables_of
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.keras_internals import (
    better_end,
    flat_layers,
    loss_tracker,
    own_non_trainable,
)
from keras_mixprec.loss_scaling.history import SKIPPED
from keras_mixprec.loss_scaling.inputs import (
    PARTS,
    first_bad_rows,
    has_bad,
    kinds_of,
)
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.spikes import gates_of, optimizers_in_step
from keras_mixprec.policies.layers import has_own_step

# The worst value of a metric, by the direction in which the metric improves.
_WORST = {"min": math.inf, "max": -math.inf, "auto": math.nan}

# The states of an epoch, in order: no batch has counted yet; no batch has
# counted yet, and none counted in the previous epoch; at least one batch has
# counted; the weights are not finite.
_BEGUN, _BEGUN_AFTER_NONE, _COUNTED, _LOST = range(4)

# The counts of an optimizer that the first step has yet to build.
_NONE = 0, 0

# The losses that the current `train_step` has passed to Keras' loss tracker.
_LOSSES: contextvars.ContextVar = contextvars.ContextVar("losses")


class MetricGuard:
    """Keeps failed batches out of training metrics and layer state.

    A batch fails if its loss is not finite, or if its gradients are a spike.
    The guard then restores all metrics and the state of all layers. For a
    custom `train_step`, a loss is each returned value or metric whose name ends
    in `"loss"`. Without such a name, every metric counts as a loss.

    Before the first good batch of an epoch, metrics show the values that they
    have without data, or NaN if the previous epoch had no good batch. An epoch
    without a good batch reports the worst value of each metric, infinity for a
    loss. Unlike NaN, this value lets callbacks see that the next epoch is
    better. Once weights are not finite, every batch shows NaN and every epoch
    reports the worst value, so that callbacks end the run. Successful steps
    stay bit-identical. `evaluate` still shows NaN if the weights cause it.

    The guard works only while `fit` calls the train function. `start` replaces
    this function by a guarded one, and `stop` restores the original. The
    optimizer's history counts the failed batches.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        on: Boolean. True between `start` and `stop`.
    """

    def __init__(self, model: keras.Model):
        self.on = False
        self._model = model
        self._in_steps, self._in_fit = Replacements(), Replacements()
        self.function = TrainFunction.of(model)
        self._layer_state: list | None = None
        self._found: list = []
        self._gates: list = []
        self._batches = 0  # Batches since the last reset of the metrics.

    def start(self):
        """Guards the steps of the model from now on."""
        self.on, self._batches = True, 0
        self._in_fit.__enter__()
        self._guard()
        self._begin_epoch(_BEGUN)

    def keep(self):
        """Guards the train function again if it was recompiled.

        Call this method before each batch.
        """
        self._batches += 1
        if self.on and not self.function.is_guarded:
            with variable_scope(self._model):
                self._guard()

    def stop(self):
        """Removes the guard from the model."""
        self.function.release()
        for gate in gates_of(self._model):
            gate.stop()
        if self.on:
            self.on = False
            self._in_fit.__exit__()
            self._begin_epoch(_BEGUN)

    def _guard(self):
        model, in_steps = self._model, self._in_steps
        self._layer_state, self._found = None, []
        if tracker := self._tracker:
            noting = _noting(tracker.update_state)
            in_steps.add(tracker, "update_state", noting)
        if (model, "reset_metrics") not in self._in_fit:
            own, reset = model.get_metrics_result, model.reset_metrics
            in_steps.add(model, "get_metrics_result", own)
            self._in_fit.add(model, "get_metrics_result", self._results(own))
            self._in_fit.add(model, "reset_metrics", self._reset(reset))
        self.function.guard(in_steps, self._guarded_step)

    @property
    def _tracker(self):
        """The metric of the loss, `None` with a custom `train_step`.

        A custom step may update this metric within `jax.grad`, or never.
        """
        tracker = loss_tracker(self._model)
        known = any(metric is tracker for metric in self._model.metrics)
        return tracker if known and not has_own_step(self._model) else None

    def _histories(self):
        """Returns the optimizers' histories; the first one counts losses."""
        if self._found:
            return self._found
        found = [
            optimizer
            for optimizer in optimizers_in_step(self._model)
            if isinstance(optimizer, LossScaleOptimizer)
        ]
        records = [each.history for each in found if each.built]
        self._gates = gates_of(self._model)
        if len(records) < len(found):
            return records
        self._found = records
        return self._found

    def _guarded_step(self, train_step):
        model = self._model

        @functools.wraps(train_step)
        def guarded(*args, **kwargs):
            token = _LOSSES.set([])
            try:
                with self._in_steps:
                    if keras.backend.backend() != "jax":
                        before = self._values()
                        logs = train_step(*args, **kwargs)
                        self._settle(logs, args[-1], before)
                        return logs
                    # On JAX, a step takes the model's state and returns the new
                    # state, so read the variables in a scope with each state.
                    with _scope(model, args[0]):
                        before = self._values()
                    logs, state = train_step(*args, **kwargs)
                    with _scope(model, state) as scope:
                        self._settle(logs, args[-1], before)
                    now = scope.get_current_value
                    parts = variables_of(model)
                    return logs, tuple([now(v) for v in part] for part in parts)
            finally:
                _LOSSES.reset(token)

        return guarded

    def _written(self):
        """Returns the variables of layers and metrics that a step writes."""
        if self._layer_state is None:
            self._layer_state = [
                variable
                for layer in flat_layers(self._model)
                for variable in own_non_trainable(layer)
                if "float" in variable.dtype
            ]
        return [*self._layer_state, *self._model.metrics_variables]

    def _counts(self):
        """Returns the counters of skipped steps, with the histories' first."""
        return [each.counts for each in [*self._histories(), *self._gates]]

    def _values(self):
        """Returns copies of the variables that a guarded step changes, by id.

        Copies are necessary because torch updates variables in place.
        """
        variables = *self._written(), *self._counts()
        return {id(v): ops.copy(v.value) for v in variables}

    def _settle(self, logs, batch, before):
        """Restores metrics and layer state if a batch fails.

        Args:
            logs: The values that the step returned. A dict is changed in place.
            batch: The batch, as `train_step` takes it.
            before: The result of `_values` before the step.
        """
        step, histories = active.step(), self._histories()
        if not histories:
            return
        logs = logs if isinstance(logs, dict) else {}
        losses = self._losses_of(logs)
        kept = [
            ops.equal(_read(v)[SKIPPED], before.get(id(v), _NONE)[SKIPPED])
            for v in self._counts()
        ]
        good = ops.all(ops.stack([*map(ops.isfinite, losses), *kept]))
        good = step.sum_over_replicas(1 - ops.cast(good, "int32"))
        if step.to_host_bool(ops.equal(good, 0)) is True:
            histories[0].epoch.assign(_COUNTED)
            return
        # XLA may round the same loss differently in each operation that uses
        # the loss. Test the loss once, so that all decisions in a step agree.
        kinds = ops.stack([ops.zeros((3,)), *map(kinds_of, losses)])
        kinds = step.sum_over_replicas(ops.max(kinds, axis=0))
        kinds = ops.cast(kinds, "int32")
        skips = [ops.logical_not(was_kept) for was_kept in kept]
        # A batch with a finite loss counts even if its gradients overflow and
        # the step is skipped, as it does without a guard.
        spikes = skips[len(histories) :]
        bad = ops.any(ops.stack([ops.any(ops.greater(kinds, 0)), *spikes]))
        # A custom `train_step` may return values of the current batch instead
        # of running means, so check each value.
        spoilt = {} if self._tracker else self._numbers()
        skipped = ops.any(ops.stack(skips))
        of_layers = len(self._layer_state or ())
        for index, variable in enumerate(self._written()):
            # A variable that the current step created has no old value, so
            # restore the variable to 0.
            old, new = before.get(id(variable), 0), _read(variable)
            undo = bad
            if index < of_layers:
                # A non-finite moving mean would stay non-finite forever, so
                # restore the old value.
                broken = ops.logical_not(ops.all(ops.isfinite(new)))
                undo = ops.logical_or(bad, ops.logical_and(skipped, broken))
            variable.assign(ops.where(undo, ops.cast(old, new.dtype), new))
        # Layer state of a bad batch is undone by now, so it is not lost.
        lost = self._record(histories, bad, kinds, skips, batch)
        epoch = _read(histories[0].epoch)
        epoch = ops.where(bad, ops.where(lost, _LOST, epoch), _COUNTED)
        histories[0].epoch.assign(epoch)
        hidden = ops.logical_or(
            ops.equal(epoch, _BEGUN_AFTER_NONE), ops.equal(epoch, _LOST)
        )
        for name, value in self._numbers().items():
            old = logs.get(name)
            if _is_number(old):
                now = bad
                if spoilt:
                    finite = ops.isfinite(spoilt[name])
                    now = ops.logical_and(bad, ops.logical_not(finite))
                value = ops.cast(ops.where(hidden, math.nan, value), old.dtype)
                logs[name] = ops.where(now, value, old)

    def _record(self, histories, bad, kinds, skips, batch):
        """Records the fault; returns whether the weights are not finite."""

        def examine():
            lost = has_bad(self._model.variables)
            return ops.concatenate([first_bad_rows(batch), lost[None]])

        def nothing():
            return ops.zeros((len(PARTS) + 1,), "int32")

        failed = ops.any(ops.stack([bad, *skips]))
        found = active.step().choose(failed, examine, nothing)
        histories[0].nonfinite_losses.assign_add(kinds)
        for history, was_skipped in zip(histories, skips, strict=False):
            history.remember_batch(was_skipped, found[:-1], kinds)
        return ops.greater(found[-1], 0)

    def _losses_of(self, logs):
        """Returns the losses of a batch, or all metrics if none is known."""
        if known := _LOSSES.get():
            return known
        numbers = self._numbers()
        own = {n: x for n, x in logs.items() if _is_number(x)}
        named = {n: x for n, x in (numbers | own).items() if n.endswith("loss")}
        return [*map(ops.convert_to_tensor, (named or numbers).values())]

    def _numbers(self):
        """Returns the scalar results of the metrics."""
        found = self._model.get_metrics_result()
        return {name: x for name, x in found.items() if _is_number(x)}

    def _results(self, get_metrics_result):
        @functools.wraps(get_metrics_result)
        def results():
            found = get_metrics_result()
            for lost in self._lost() if self._batches else ():
                for name, value in found.items():
                    if _is_number(value):
                        worst = _WORST[better_end(self._model, name)]
                        worst = ops.cast(worst, value.dtype)
                        found[name] = ops.where(lost, worst, value)
            return found

        return results

    def _lost(self):
        """Returns `[True]` if no batch of the epoch counts, `[]` if unknown."""
        first = self._histories()[:1]
        return [ops.not_equal(_read(each.epoch), _COUNTED) for each in first]

    def _reset(self, reset_metrics):
        @functools.wraps(reset_metrics)
        def reset():
            # If no batch was counted since the last reset, a validation resets
            # the metrics, and no epoch has ended.
            ended = self._lost() if self._batches else ()
            self._batches = 0
            reset_metrics()
            for lost in ended:
                state = ops.where(lost, _BEGUN_AFTER_NONE, _BEGUN)
                self._begin_epoch(state)

        return reset

    def _begin_epoch(self, state):
        for history in self._histories()[:1]:
            history.epoch.assign(state)


def _noting(update_state):
    @functools.wraps(update_state)
    def noting(values, sample_weight=None):
        _LOSSES.get().append(ops.convert_to_tensor(values))
        return update_state(values, sample_weight=sample_weight)

    return noting


def _scope(model, state):
    return keras.StatelessScope(state_mapping=pairs_of(model, state))


def _read(variable):
    return ops.convert_to_tensor(variable.value)


def _is_number(value):
    if not ops.is_tensor(value):
        return isinstance(value, float)
    return value.shape == () and "float" in str(value.dtype)
