"""Metrics that a skipped step leaves as they were.

One batch whose forward pass overflows makes Keras' running means NaN for the
rest of the epoch, although the optimizer skipped the step. `EarlyStopping`,
`ReduceLROnPlateau`, `ModelCheckpoint(save_best_only=True)` and
`TerminateOnNaN` then act on a fault that is over.
"""

import functools
import math

import keras
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of, variable_scope
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.keras_internals import (
    AutocastScope,
    better_end,
    loss_tracker,
)
from keras_mixprec.loss_scaling.current_step import (
    kinds_of,
    loss,
    loss_is,
    loss_kinds,
    training_on,
)
from keras_mixprec.loss_scaling.history import CONSECUTIVE
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.spikes import gates_of
from keras_mixprec.policies.layers import has_own_step

# The worst value, by the better end of a metric.
_WORST = {"min": math.inf, "max": -math.inf, "auto": math.nan}


class MetricGuard:
    """Keeps batches whose loss is not finite out of training metrics.

    After such a batch all metrics have the state that they had before. For a
    custom `train_step`, the loss is each value that it returns, or gives to a
    metric, under a name that ends in `"loss"`. Without such a name, every
    metric counts.

    Until an epoch has a finite batch, batches show the values of metrics that
    have seen no data, and NaN after an epoch without any finite batch. Such an
    epoch reports the worst value of each metric, infinity for a loss. The next
    epoch is then better, which callbacks could not see after NaN. Once weights
    are lost, every batch shows NaN and every epoch reports the worst value, so
    that callbacks end the run. Everything else stays the same, bit for bit.
    `evaluate` shows NaN, because there it is the truth about the weights.

    It guards the state that layers write themselves, too.

    The model is changed only while `fit` calls its train function: `start`
    replaces that by a guarded one, and `stop` leaves no trace. The optimizer's
    record counts the batches.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        on: Boolean, true between `start` and `stop`.
    """

    def __init__(self, model: keras.Model):
        self.on = False
        self._model = model
        self._in_steps, self._in_fit = Replacements(), Replacements()
        self.function = TrainFunction.of(model)
        self._batches = 0  # Since the metrics were reset.
        self._counted = None  # Losses not finite, when the epoch began.

    def start(self):
        """Guards the steps of the model from now on."""
        self.on = True
        self._in_fit.__enter__()
        self._guard()
        self._begin_epoch(lost=False)

    def keep(self):
        """Guards the train function again if it was recompiled.

        Call it before each batch.
        """
        self._batches += 1
        if self.on and not self.function.is_guarded:
            with variable_scope(self._model):
                self._guard()

    def stop(self):
        """Leaves the model as it is without a guard."""
        self.function.release()
        for gate in gates_of(self._model):
            gate.stop()
        if self.on:
            self.on = False
            self._in_fit.__exit__()

    def _guard(self):
        model, in_steps = self._model, self._in_steps
        _guard_state(model, in_steps)
        tracker = self._tracker
        if tracker and (tracker, "update_state") not in in_steps:
            noting = self._note_loss(tracker.update_state)
            in_steps.add(tracker, "update_state", noting)
        if (model, "reset_metrics") not in self._in_fit:
            own, reset = model.get_metrics_result, model.reset_metrics
            in_steps.add(model, "get_metrics_result", own)
            self._in_fit.add(model, "get_metrics_result", self._results(own))
            self._in_fit.add(model, "reset_metrics", self._reset(reset))
        self.function.guard(in_steps, self._guarded_step)

    @property
    def _tracker(self):
        """The metric of the loss, `None` in a step of the user's own.

        A custom step may update it within `jax.grad`, or never.
        """
        tracker = loss_tracker(self._model)
        known = any(metric is tracker for metric in self._model.metrics)
        return tracker if known and not has_own_step(self._model) else None

    def _histories(self):
        """The records of the model's optimizers; the first counts losses."""
        return [
            optimizer.history
            for optimizer in optimizers_of(self._model).values()
            if isinstance(optimizer, LossScaleOptimizer) and optimizer.built
        ]

    # A step.

    def _guarded_step(self, train_step):
        @functools.wraps(train_step)
        def guarded(*args, **kwargs):
            model = self._model
            state = args[0] if keras.backend.backend() == "jax" else None
            layers = (
                model.non_trainable_variables if gates_of(self._model) else []
            )
            written = [*layers, *model.metrics_variables]
            if state:
                values = [*(state[1] if layers else []), *state[3]]
            # torch overwrites the variables' memory, so copies are needed.
            else:
                values = [ops.copy(v.value) for v in written]
            before = dict(zip(map(id, written), values, strict=True))

            def weights():
                return [*state[0], *state[1]] if state else model.variables

            with self._in_steps, training_on(args[-1:], weights):
                returned = train_step(*args, **kwargs)
                if state:
                    return self._settled_state(before, *returned)
                self._settle(returned, before)
                return returned

        return guarded

    def _settled_state(self, before, logs, state):
        """The same on JAX, where a step is a function of the state."""
        model = self._model
        parts = (
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        mapping = [
            pair
            for variables, values in zip(parts, state[1:], strict=True)
            for pair in zip(variables, values, strict=True)
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self._settle(logs, before)
        now = [[scope.get_current_value(v) for v in part] for part in parts]
        return logs, (state[0], *now)

    def _note_loss(self, update_state):
        @functools.wraps(update_state)
        def noting(values, sample_weight=None):
            loss_is(ops.convert_to_tensor(values))
            return update_state(values, sample_weight=sample_weight)

        return noting

    def _settle(self, logs, before):
        """Undoes what a batch without a finite loss did to metrics.

        Args:
            logs: The values that the step returned; changed if they are a dict.
            before: Dict from the ids of the metrics' variables to their values
                before it.
        """
        self._undo_spike(logs, before)
        losses = self._losses_of(logs) if isinstance(logs, dict) else []
        if not losses or all(map(active.step().known_finite, losses)):
            return
        histories = self._histories()
        # JAX's step state holds no other optimizer.
        if keras.backend.backend() == "jax":
            own = getattr(self._model.optimizer, "history", None)
            histories = [h for h in histories if h is own]
        if not histories:
            return
        kinds = ops.max(ops.stack([kinds_of(x) for x in losses]), axis=0)
        bad = ops.any(ops.greater(kinds, 0))
        kinds = ops.cast(active.step().sum_over_replicas(kinds), "int32")
        counter = histories[0].nonfinite_losses
        counter.assign(ops.add(_read(counter), kinds))
        # A custom step may return values of this batch alone.
        spoilt = {} if self._tracker else self._numbers()
        if keras.backend.backend() == "jax":
            # There the loss is known after the step is recorded.
            for history in histories:
                history.remember_loss(loss_kinds())
        for variable in self._model.metrics_variables:
            _put_back(variable, before, bad)
        hidden = ops.logical_or(
            self._weights_lost(histories),
            ops.logical_and(
                self._untouched(),
                ops.greater(_read(histories[0].epoch_lost), 0),
            ),
        )
        for name, value in self._numbers().items():
            old = logs.get(name)
            if _is_number(old):
                now = bad
                if spoilt:
                    now = ops.logical_and(bad, _not_finite(spoilt[name]))
                value = ops.cast(ops.where(hidden, math.nan, value), old.dtype)
                logs[name] = ops.where(now, value, old)

    def _undo_spike(self, logs, before):
        """Undoes all that a step that was a spike has written."""
        model, spiked = self._model, self._spiked()
        if spiked is False:
            return
        for variable in (
            *model.non_trainable_variables,
            *model.metrics_variables,
        ):
            _put_back(variable, before, spiked)
        for name, value in self._numbers().items():
            old = logs.get(name) if isinstance(logs, dict) else None
            if _is_number(old):
                logs[name] = ops.where(spiked, ops.cast(value, old.dtype), old)

    def _spiked(self):
        """Whether the last step was a spike; `False` if nobody asks."""
        gates = gates_of(self._model)
        return bool(gates) and ops.any(ops.stack([g.skips for g in gates]))

    def _losses_of(self, logs):
        """The loss of a batch, or what may stand for it."""
        if (known := loss()) is not None:
            return [known]
        named = {
            metric.name: metric.result()
            for metric in _leaf_metrics(self._model.metrics)
            if metric.name.endswith("loss")
        }
        named |= {n: x for n, x in logs.items() if n.endswith("loss")}
        values = named.values() if named else self._numbers().values()
        return [*map(ops.convert_to_tensor, filter(_is_number, values))]

    def _numbers(self):
        """The results of the metrics that are scalars."""
        found = self._model.get_metrics_result()
        return {name: x for name, x in found.items() if _is_number(x)}

    def _untouched(self):
        """Returns whether no batch has counted since the metrics were reset."""
        tracker = self._tracker
        counts = [tracker.count] if tracker else self._model.metrics_variables
        zero = [ops.all(ops.equal(_read(v), 0)) for v in counts]
        return ops.all(ops.stack(zero)) if zero else True

    def _weights_lost(self, histories):
        """Returns whether lost weights made the last step be skipped."""
        lost = [
            ops.logical_and(
                ops.greater(_read(history.counts)[CONSECUTIVE], 0),
                ops.greater(_read(history.lost_weights), 0),
            )
            for history in histories
        ]
        return ops.any(ops.stack(lost))

    # An epoch.

    def _results(self, get_metrics_result):
        @functools.wraps(get_metrics_result)
        def results():
            found = get_metrics_result()
            if self._batches and (histories := self._histories()):
                lost = self._epoch_lost(histories)
                for name, value in found.items():
                    if _is_number(value):
                        end = better_end(self._model, name)
                        worst = ops.cast(_WORST[end], value.dtype)
                        found[name] = ops.where(lost, worst, value)
            return found

        return results

    def _epoch_lost(self, histories):
        """Returns whether an epoch had no finite batch, or weights are lost."""
        now = _read(histories[0].nonfinite_losses)
        before = 0 if self._counted is None else self._counted
        bad = ops.any(ops.greater(now, before))
        bad = ops.logical_or(bad, self._spiked())
        skipped = ops.logical_and(bad, self._untouched())
        return ops.logical_or(skipped, self._weights_lost(histories))

    def _reset(self, reset_metrics):
        @functools.wraps(reset_metrics)
        def reset():
            histories = self._histories()
            # Other resets belong to a validation.
            ended = self._batches and histories
            lost = self._epoch_lost(histories) if ended else None
            self._batches = 0
            reset_metrics()
            self._begin_epoch(lost)

        return reset

    def _begin_epoch(self, lost=None):
        for history in self._histories()[:1]:
            self._counted = active.step().read(history.nonfinite_losses).copy()
            if lost is not None:
                history.epoch_lost.assign(ops.cast(lost, "int32"))


def _put_back(variable, before, condition):
    # A variable that a metric creates during the step starts at 0.
    old, new = before.get(id(variable), 0), _read(variable)
    variable.assign(ops.where(condition, ops.cast(old, new.dtype), new))


def _read(variable):
    return ops.convert_to_tensor(variable.value)


def _guard_state(model, in_steps: Replacements):
    """Keeps finite numbers in a model's state from becoming non-finite.

    It works element by element, so that other channels are updated. Finite
    updates are written as they are.

    Args:
        model: A built `keras.Model`.
        in_steps: The replacements that hold during training steps.
    """
    for variable in model.non_trainable_variables:
        if "float" in variable.dtype and (variable, "assign") not in in_steps:
            in_steps.add(variable, "assign", _keeping_finite(variable))


def _keeping_finite(variable):
    assign = variable.assign

    @functools.wraps(assign)
    def guarded(value):
        value = ops.convert_to_tensor(value, dtype=variable.dtype)
        if active.step().known_finite(value):
            return assign(value)
        # Autocast would read the stored value in 16 bits.
        with AutocastScope(None):
            old = ops.convert_to_tensor(variable.value)
        lost = ops.logical_and(
            ops.logical_not(ops.isfinite(value)), ops.isfinite(old)
        )
        return assign(ops.where(lost, old, value))

    return guarded


def _leaf_metrics(metrics: list) -> list:
    """The metrics without those that only hold others."""
    found = []
    for metric in metrics:
        parts = getattr(metric, "metrics", None)
        found += _leaf_metrics(parts) if isinstance(parts, list) else [metric]
    return found


def _not_finite(value):
    return ops.logical_not(ops.isfinite(value))


def _is_number(value):
    if not ops.is_tensor(value):
        return isinstance(value, float)
    return value.shape == () and "float" in str(value.dtype)
