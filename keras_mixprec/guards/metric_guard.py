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
import numpy as np
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of, variable_scope
from keras_mixprec.formats import count_kinds
from keras_mixprec.guards.step_state import guard_state, step_state
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.keras_internals import (
    better_end,
    compiled_loss,
    loss_tracker,
    metric_variables,
)
from keras_mixprec.loss_scaling.current_step import loss_is, training_on
from keras_mixprec.loss_scaling.history import CONSECUTIVE
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.policies.layers import has_own_step

# Added to a loss, the sum is NaN: if the loss is NaN, NaN or inf, NaN or -inf.
_PROBES = np.array([0, -np.inf, np.inf], "float32")

# By the better end of a metric.
_WORST = {"min": math.inf, "max": -math.inf, "auto": math.nan}


class MetricGuard:
    """Keeps batches whose loss is not finite out of training metrics.

    After such a batch all metrics have the state that they had before. Of a
    `train_step` of the user's own the loss is what it returns, or gives to a
    metric, under a name that ends in `"loss"`, or else any metric.

    Until an epoch has a finite batch, batches show what the epoch before
    reported, NaN in the first. An epoch without any reports the worst value of
    each metric, infinity for a loss: whatever comes next is better, which NaN
    does not let callbacks see. Once weights are lost every batch shows NaN and
    every epoch reports the worst: a run that cannot go on shall end. Everything
    else is as before, bit for bit: in `evaluate`, NaN is the truth about the
    weights.

    The state that layers write themselves is guarded as well.

    The model is another one only while `fit` calls its train function:
    `start` replaces that by a guarded one, and `stop` leaves no trace.

    Args:
        model: A built and compiled `keras.Model`.
        earlier: Dict. What to count `nonfinite_losses` from. Defaults to
            `None`, zeros.

    Attributes:
        on: Boolean. Whether it is between `start` and `stop`.
    """

    def __init__(self, model: keras.Model, earlier: dict | None = None):
        self.on = False
        self._model = model
        self._in_steps, self._in_fit = Replacements(), Replacements()
        self.function = TrainFunction.of(model)
        # Variables that a metric has between `start` and `stop`. On JAX a step
        # writes no others than the model's, its optimizer's and its metrics'.
        self._home: keras.metrics.Metric | None = None
        self._lent: list = []
        # Counts of `_PROBES`, and what they were when the epoch began.
        self._losses = self._losses_before = None
        # What was shown last, and a 1: replicas have a share of both.
        self._last = None
        self._names: list = []  # In this order.
        self._known: list | None = None
        self._earlier = earlier or count_kinds()
        self._batches = 0  # Since the metrics were reset.
        # The replicas of a `MirroredStrategy` are threads that take turns.
        self._inside = threading.local()

    @property
    def nonfinite_losses(self) -> dict:
        """How many batches of this process had a loss that is not finite, ever.

        A dict with `"inf"`, `"-inf"` and `"nan"`, of which a batch counts for
        one; each replica counts its own part of a batch.
        """
        counts = self._earlier
        if self._losses is not None:
            nan, *others = active.step().read_sum(self._losses)
            now = count_kinds([*(n - nan for n in others), nan])
            counts = {kind: n + now[kind] for kind, n in counts.items()}
        return counts

    @property
    def counters(self) -> list:
        """The variables that are read for it."""
        return [] if self._losses is None else [self._losses]

    def start(self):
        """Guards the steps of the model from now on."""
        self.on = True
        if self._home is not None:
            # First, since a compiled step goes by the order.
            metric_variables(self._home)[:0] = self._lent
        self._in_fit.put()
        self._guard()
        self._rebuild_test_function()

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
        if not self.on:
            return
        self.on = False
        self._in_fit.restore()
        for variable in self._lent:
            if variable is not self._losses:
                # A step that failed to compile may have left no value.
                variable.assign(ops.zeros(variable.shape, variable.dtype))
        self._begin_epoch()
        if self._home is not None:
            del metric_variables(self._home)[: len(self._lent)]
        self._rebuild_test_function()

    def _rebuild_test_function(self):
        # A distributed one on JAX returns as many variables of metrics as
        # there were when it was made.
        distributed = keras.distribution.distribution() is not None
        if distributed and self._model.test_function is not None:
            self._model.make_test_function(force=True)

    def _guard(self):
        model, in_steps = self._model, self._in_steps
        guard_state(model, in_steps)
        self._lend()
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

    def _lend(self):
        """Makes the variables of the guard, each as soon as it can."""
        metrics = self._model.metrics
        if self._last is not None or not metrics:
            return
        parts = leaf_metrics(metrics)
        if self._home is None:
            # A `Mean` resets its own two variables only.
            means = [m for m in parts if isinstance(m, keras.metrics.Mean)]
            self._home = (means or parts)[0]
            self._losses = self._new("nonfinite_losses", _PROBES.shape)
            self._losses_before = self._new("earlier_losses", _PROBES.shape)
        # The trackers of several outputs' losses appear when it is built.
        loss = compiled_loss(self._model)
        if all(getattr(part, "built", True) for part in (*metrics, loss)):
            self._last = self._new("last_results", (len(parts) + 1,))

    def _new(self, name, shape):
        variable = self._home.add_variable(shape, "zeros", name=name)
        own = metric_variables(self._home)
        own.insert(len(self._lent), own.pop())
        self._lent.append(variable)
        return variable

    def _variables(self):
        """Those of the metrics, without what they were lent."""
        if self._known is not None:
            return self._known
        lent = {id(variable) for variable in self._lent}
        found = [v for v in self._model.metrics_variables if id(v) not in lent]
        if self._last is not None:  # All are built.
            self._known = found
        return found

    # A step.

    def _guarded_step(self, train_step):
        @functools.wraps(train_step)
        def guarded(*args, **kwargs):
            self._inside.loss = None
            batch = args[-1] if args else None
            step = step_state(self._model, args, self._variables())
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
        if step.may_make_variables:
            self._lend()
        losses = self._losses_of(step)
        count = step.value(self._losses) if losses else None
        if count is None or all(map(active.step().known_finite, losses)):
            return
        kinds = ops.max(ops.stack([_kinds(x) for x in losses]), axis=0)
        bad = ops.any(ops.greater(kinds, 0))
        step.assign(self._losses, ops.add(count, kinds))
        # What a step of the user's own returns may be of the batch alone.
        spoilt = {} if self._tracker else self._numbers(step)
        step.remember_loss([o.history for o in self._optimizers()])
        step.restore(bad, self._variables())
        untouched = self._untouched(step.value)
        lost = self._weights_lost(step.value)
        for name, value in self._numbers(step).items():
            if _is_number(step.logs.get(name)):
                value = ops.where(
                    untouched, self._shown_last(step, name), value
                )
                value = ops.where(lost, math.nan, value)
                now = bad
                if spoilt:
                    now = ops.logical_and(bad, _not_finite(spoilt[name]))
                old = step.logs[name]
                value = ops.cast(value, old.dtype)
                step.logs[name] = ops.where(now, value, old)

    def _losses_of(self, step):
        """The loss of a batch, or what may stand for it."""
        if self._inside.loss is not None:
            return [self._inside.loss]
        with step.state():
            named = {
                metric.name: metric.result()
                for metric in leaf_metrics(self._model.metrics)
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
        counts = [tracker.count] if tracker else self._variables()
        zero = [ops.all(ops.equal(value(v), 0)) for v in counts]
        return ops.all(ops.stack(zero))

    def _weights_lost(self, value):
        """Whether the last step was skipped since weights are not finite."""
        lost = [
            ops.logical_and(
                ops.greater(value(history.counts)[CONSECUTIVE], 0),
                ops.greater(value(history.lost_weights), 0),
            )
            for history in (o.history for o in self._optimizers())
            if value(history.counts) is not None
        ]
        return ops.any(ops.stack(lost)) if lost else False

    def _optimizers(self):
        return [
            optimizer
            for optimizer in optimizers_of(self._model).values()
            if isinstance(optimizer, LossScaleOptimizer) and optimizer.built
        ]

    def _place(self, name):
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def _shown_last(self, step, name):
        place = self._place(name)
        if self._last is None or place + 1 >= self._last.shape[0]:
            return math.nan
        last = step.value(self._last)
        found = ops.divide(last[place], last[-1])
        return ops.where(ops.isfinite(found), found, math.nan)

    # An epoch.

    def _results(self, get_metrics_result):
        @functools.wraps(get_metrics_result)
        def results():
            found = get_metrics_result()
            if self._batches and self._losses is not None:
                unknown = self._unknown()
                for name, value in found.items():
                    if _is_number(value):
                        end = better_end(self._model, name)
                        worst = ops.cast(_WORST[end], value.dtype)
                        found[name] = ops.where(unknown, worst, value)
            return found

        return results

    def _unknown(self):
        """Whether an epoch had no finite batch, or its weights are lost."""
        bad = ops.any(ops.greater(self._losses, self._losses_before))
        read = ops.convert_to_tensor
        skipped = ops.logical_and(bad, self._untouched(read))
        return ops.logical_or(skipped, self._weights_lost(read))

    def _reset(self, reset_metrics):
        @functools.wraps(reset_metrics)
        def reset():
            # What else there is to reset is of a validation.
            if self._batches and self._last is not None:
                self._keep_last(self._model.get_metrics_result())
            self._batches = 0
            reset_metrics()
            self._begin_epoch()

        return reset

    def _begin_epoch(self):
        if self._losses is not None:
            # A copy: JAX gives each buffer away once.
            self._losses_before.assign(ops.copy(self._losses.value))

    def _keep_last(self, results):
        for name in filter(lambda n: _is_number(results[n]), results):
            self._place(name)
        shown = [results.get(name, math.nan) for name in self._names]
        count = self._last.shape[0] - 1
        shown = [*shown, *[math.nan] * count][:count]
        shown = [ops.cast(value, "float32") for value in (*shown, 1.0)]
        self._last.assign(ops.stack(shown))


def leaf_metrics(metrics: list) -> list:
    """Returns the metrics without those that only hold others."""
    found = []
    for metric in metrics:
        parts = getattr(metric, "metrics", None)
        found += leaf_metrics(parts) if isinstance(parts, list) else [metric]
    return found


def _kinds(loss):
    """What to count of a loss, as `_PROBES`."""
    total = ops.cast(loss, "float32")
    total = total if total.shape == () else ops.sum(total)
    return ops.cast(ops.isnan(ops.add(total, _PROBES)), "float32")


def _not_finite(value):
    return ops.logical_not(ops.isfinite(value))


def _is_number(value):
    if not ops.is_tensor(value):
        return isinstance(value, float)
    return value.shape == () and "float" in str(value.dtype)
