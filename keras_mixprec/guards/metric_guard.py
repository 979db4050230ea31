"""Metrics that a skipped step leaves as they were.

One batch whose forward pass overflows makes Keras' running means NaN for the
rest of the epoch, although the optimizer skipped the step. `EarlyStopping`,
`ReduceLROnPlateau`, `ModelCheckpoint(save_best_only=True)` and
`TerminateOnNaN` then act on a fault that is over.
"""

import contextlib
import functools
import math
import threading

import keras
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of, variable_scope
from keras_mixprec.guards.step_state import guard_state, step_state
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.keras_internals import better_end, loss_tracker
from keras_mixprec.loss_scaling.current_step import (
    kinds_of,
    loss_is,
    training_on,
)
from keras_mixprec.loss_scaling.history import CONSECUTIVE
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.policies.layers import has_own_step

# By the better end of a metric.
_WORST = {"min": math.inf, "max": -math.inf, "auto": math.nan}


class MetricGuard:
    """Keeps batches whose loss is not finite out of training metrics.

    After such a batch all metrics have the state that they had before. Of a
    `train_step` of the user's own the loss is what it returns, or gives to a
    metric, under a name that ends in `"loss"`, or else any metric.

    Until an epoch has a finite batch, batches show what Keras shows of metrics
    that have seen none, and NaN after an epoch without any. Such an epoch
    reports the worst value of each metric, infinity for a loss: whatever comes
    next is better, which NaN does not let callbacks see. Once weights are lost
    every batch shows NaN and every epoch reports the worst: a run that cannot
    go on shall end. Everything else is as before, bit for bit: in `evaluate`,
    NaN is the truth about the weights.

    The state that layers write themselves is guarded as well.

    The model is another one only while `fit` calls its train function:
    `start` replaces that by a guarded one, and `stop` leaves no trace. The
    optimizer's record counts the batches.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        on: Boolean. Whether it is between `start` and `stop`.
    """

    def __init__(self, model: keras.Model):
        self.on = False
        self._model = model
        self._in_steps, self._in_fit = Replacements(), Replacements()
        self.function = TrainFunction.of(model)
        self._batches = 0  # Since the metrics were reset.
        self._counted = None  # Losses not finite, when the epoch began.
        # The replicas of a `MirroredStrategy` are threads that take turns.
        self._inside = threading.local()

    def start(self):
        """Guards the steps of the model from now on."""
        self.on = True
        self._in_fit.put()
        self._guard()
        self._begin_epoch(lost=False)

    def keep(self):
        """Guards the train function again if it was recompiled.

        To be called before each batch.
        """
        self._batches += 1
        if self.on and not self.function.is_guarded:
            with variable_scope(self._model):
                self._guard()

    def in_steps(self):
        """Context in which the model is what it is during a guarded step."""
        if not self.on:
            return contextlib.nullcontext()
        return self._in_steps.in_place()

    def stop(self):
        """Leaves the model as it is without a guard."""
        self.function.release()
        if self.on:
            self.on = False
            self._in_fit.restore()

    def _guard(self):
        model, in_steps = self._model, self._in_steps
        guard_state(model, in_steps)
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

        That may give it losses within `jax.grad`, or none at all.
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
            self._inside.loss = None
            batch = args[-1] if args else None
            step = step_state(self._model, args)
            with self.in_steps(), training_on(batch, step.weights):
                step.finish(train_step(*args, **kwargs))
                if isinstance(step.logs, dict):
                    self._settle(step)
                return step.returned()

        return guarded

    def _note_loss(self, update_state):
        @functools.wraps(update_state)
        def noting(values, sample_weight=None):
            self._inside.loss = ops.convert_to_tensor(values)
            loss_is(self._inside.loss)
            return update_state(values, sample_weight=sample_weight)

        return noting

    def _settle(self, step):
        """Undoes what a batch without a finite loss did to metrics."""
        losses = self._losses_of(step)
        if not losses or all(map(active.step().known_finite, losses)):
            return
        histories = [
            h for h in self._histories() if step.value(h.counts) is not None
        ]
        if not histories:
            return
        kinds = ops.max(ops.stack([kinds_of(x) for x in losses]), axis=0)
        bad = ops.any(ops.greater(kinds, 0))
        counter = histories[0].nonfinite_losses
        kinds = ops.cast(active.step().sum_over_replicas(kinds), "int32")
        step.assign(counter, ops.add(step.value(counter), kinds))
        # What a step of the user's own returns may be of the batch alone.
        spoilt = {} if self._tracker else self._numbers(step)
        step.remember_loss(histories)
        step.restore(bad)
        hidden = ops.logical_or(
            self._weights_lost(histories, step.value),
            ops.logical_and(
                self._untouched(step.value),
                ops.greater(step.value(histories[0].epoch_lost), 0),
            ),
        )
        for name, value in self._numbers(step).items():
            old = step.logs.get(name)
            if _is_number(old):
                now = bad
                if spoilt:
                    now = ops.logical_and(bad, _not_finite(spoilt[name]))
                value = ops.cast(ops.where(hidden, math.nan, value), old.dtype)
                step.logs[name] = ops.where(now, value, old)

    def _losses_of(self, step):
        """The loss of a batch, or what may stand for it."""
        if self._inside.loss is not None:
            return [self._inside.loss]
        with step.state():
            named = {
                metric.name: metric.result()
                for metric in _leaf_metrics(self._model.metrics)
                if metric.name.endswith("loss")
            }
        named |= {n: x for n, x in step.logs.items() if n.endswith("loss")}
        values = named.values() if named else self._numbers(step).values()
        return [*map(ops.convert_to_tensor, filter(_is_number, values))]

    def _numbers(self, step):
        """The results of the metrics that are scalars, as a step has them."""
        with step.state():
            found = self._model.get_metrics_result()
        return {name: x for name, x in found.items() if _is_number(x)}

    def _untouched(self, value):
        """Whether no batch has counted since the metrics were reset."""
        tracker = self._tracker
        counts = [tracker.count] if tracker else self._model.metrics_variables
        zero = [ops.all(ops.equal(value(v), 0)) for v in counts]
        return ops.all(ops.stack(zero)) if zero else True

    def _weights_lost(self, histories, value):
        """Whether the last step was skipped since weights are not finite."""
        lost = [
            ops.logical_and(
                ops.greater(value(history.counts)[CONSECUTIVE], 0),
                ops.greater(value(history.lost_weights), 0),
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
        """Whether an epoch had no finite batch, or its weights are lost."""
        read = ops.convert_to_tensor
        now = read(histories[0].nonfinite_losses)
        before = 0 if self._counted is None else self._counted
        bad = ops.any(ops.greater(now, before))
        skipped = ops.logical_and(bad, self._untouched(read))
        return ops.logical_or(skipped, self._weights_lost(histories, read))

    def _reset(self, reset_metrics):
        @functools.wraps(reset_metrics)
        def reset():
            histories = self._histories()
            # What else there is to reset is of a validation.
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
