"""Metrics that a skipped step does not turn into NaN.

One batch whose forward pass overflows makes Keras' running means NaN for the
rest of the epoch, although the optimizer skipped the step. `EarlyStopping`,
`ReduceLROnPlateau`, `ModelCheckpoint(save_best_only=True)` and
`TerminateOnNaN` then act on a fault that is over.
"""

import functools
import math
import threading

import keras
from keras import ops

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of, variable_scope
from keras_mixprec.formats import count_kinds
from keras_mixprec.guards.metric_variables import (
    AveragedLosses,
    LastResult,
    LentVariables,
    NonfiniteLosses,
    SeenBatches,
    is_number,
    nan_where,
    unless,
)
from keras_mixprec.guards.step_result import (
    guard_state,
    incoming_weights,
    step_result,
)
from keras_mixprec.guards.train_function import GuardedFunction
from keras_mixprec.keras_internals import compiled_loss, loss_tracker
from keras_mixprec.loss_scaling.current_step import (
    are_finite,
    loss_is,
    training_on,
)
from keras_mixprec.loss_scaling.history import CONSECUTIVE
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.policies.layers import has_own_step


class MetricGuard:
    """Keeps batches that the optimizer skipped out of training metrics.

    After a batch whose loss is not finite a metric has the state that it had
    before. Metrics that are updated before the loss is known, and those of a
    `train_step` of the user's own, go by their own state. Until an epoch has a
    finite batch they show what the epoch before reported, NaN in the first. An
    epoch without any finite batch reports NaN, and so does every batch from the
    one on before which weights were lost: a run that cannot go on shall end.
    Everything else is as before, bit for bit: outside `train_step`, in
    `evaluate`, NaN is the truth about the weights.

    The state that layers write themselves is guarded as well.

    The model is another one only while `fit` calls its train function:
    `start` replaces that by a guarded one, and `stop` leaves no trace.

    Args:
        model: A built and compiled `keras.Model`.
        earlier: Dict. What to count `nonfinite_losses` from. Defaults to
            `None`, zeros.

    Attributes:
        on: Boolean. Whether it is between `start` and `stop`.
        epoch_was_skipped: Boolean. Whether a metric reported NaN since every
            step of an epoch was skipped.
        comparing: References to the callbacks of this `fit` that remember a
            best value, `None` until they are sought.
    """

    def __init__(self, model: keras.Model, earlier: dict | None = None):
        self.on = self.epoch_was_skipped = False
        self.comparing = None
        self._model = model
        self._in_steps, self._in_fit = Replacements(), Replacements()
        self.function = GuardedFunction(
            model, self._in_steps, self._guarded_step
        )
        self._variables = LentVariables()
        self._losses = self._weights_lost = None
        self._own_losses: list = []
        self._losses_earlier = earlier or count_kinds()
        self._batches = 0
        # The replicas of a `MirroredStrategy` are threads that take turns.
        self._inside = threading.local()

    @property
    def nonfinite_losses(self) -> dict:
        """How many batches of this process had a loss that is not finite, ever.

        A dict with `"inf"`, `"-inf"` and `"nan"`, of which a batch counts for
        one; each replica counts its own part of a batch. For a `train_step` of
        the user's own it is what it gives to the worst of the metrics called
        `"..loss"`, or else returns under such a name.
        """
        read = [losses.read() for losses in self._all_losses]
        counts = read or [self._losses_earlier]
        return {kind: max(c[kind] for c in counts) for kind in counts[0]}

    @property
    def counters(self) -> list:
        """The variables that are read for it."""
        return [losses.variable for losses in self._all_losses]

    @property
    def _all_losses(self):
        return [self._losses] if self._losses else self._own_losses

    @property
    def fits(self) -> bool:
        """Whether the model was not compiled again since the last `start`."""
        return self.function.fits

    def start(self):
        """Guards the steps of the model from now on."""
        self.on = True
        self._variables.put()
        self._in_fit.put()
        self._guard_all()
        self.function.put()
        self._rebuild_test_function()

    def keep(self):
        """Guards the train function again if it was recompiled.

        To be called before each batch.
        """
        self._batches += 1
        if not self.function.in_place:
            with variable_scope(self._model):
                self._guard_all()
            self.function.put()

    def in_steps(self):
        """Context in which the model is what it is during a guarded step."""
        return self._in_steps.in_place()

    def stop(self):
        """Leaves the model as it is without a guard."""
        self.on = False
        self._in_fit.restore()
        # `evaluate` may read them.
        self._variables.clear(*self.counters)
        for losses in self._all_losses:
            losses.count_from_here()
        self._variables.take()
        self.function.remove()
        self._rebuild_test_function()

    def _rebuild_test_function(self):
        # A distributed one on JAX returns as many variables of metrics as
        # there were when it was made.
        distributed = keras.distribution.distribution() is not None
        if distributed and self._model.test_function is not None:
            self._model.make_test_function(force=True)

    def _guard_all(self):
        model = self._model
        guard_state(model, self._in_steps)
        # Keras' own step updates it first. Another may do so within
        # `jax.grad`, whose tensors must not be used outside.
        if not self._own_step:
            self._count_on(loss_tracker(model))
        for metric in model.metrics:
            self._guard_metric(metric)
        # The trackers of several outputs' losses appear when it is built.
        self._guard_on_build(compiled_loss(model))

    @property
    def _own_step(self):
        return has_own_step(self._model)

    def _count_on(self, tracker):
        if tracker is not None and not self._is_loss(tracker):
            self._losses = self._count_of(tracker)

    def _count_of(self, tracker):
        return NonfiniteLosses(self._variables, tracker, self.nonfinite_losses)

    def _is_loss(self, metric):
        return self._losses is not None and metric is self._losses.tracker

    # The train step.

    def _guarded_step(self, train_step):
        @functools.wraps(train_step)
        def guarded(*args, **kwargs):
            self._inside.loss_is_finite, self._inside.counted = None, False
            batch = args[-1] if args else None
            weights = functools.partial(incoming_weights, self._model, args)
            try:
                with self.in_steps(), training_on(batch, weights):
                    returned = train_step(*args, **kwargs)
                    return self._nan_logs_if_weights_lost(returned)
            finally:
                self._inside.loss_is_finite = None

        return guarded

    def _nan_logs_if_weights_lost(self, returned):
        """What a step returned, with NaN for logs if weights were lost."""
        if self._weights_lost is None or self._inside.loss_is_finite is True:
            return returned
        result = step_result(self._model, returned)
        result.remember_loss(self._optimizers())
        self._count_logged(result)
        finite = self._inside.loss_is_finite
        if finite is None:
            finite = self._was_applied(result)
        lost = self._weights_are_lost(result, finite)
        known = result.value(self._weights_lost)
        may_be_lost = lost is not False and known is not None
        if may_be_lost and isinstance(result.logs, dict):
            lost = ops.cast(lost, known.dtype)
            result.assign(self._weights_lost, ops.maximum(known, lost))
            result.logs = {
                name: nan_where(lost, value)
                for name, value in result.logs.items()
            }
        return result.returned()

    def _weights_are_lost(self, result, finite):
        """Whether a weight is not finite, in a step whose loss is not."""
        records = [o.history for o in self._optimizers()]
        found = [result.value(record.lost_weights) for record in records]
        if not found or any(value is None for value in found):
            return active.step().unless(
                finite, lambda: ops.logical_not(are_finite(result.weights()))
            )
        # Found where the optimizer skips a step: a branch of its own takes
        # 2.5% of a step of 40 small layers on JAX.
        skipped = ops.logical_not(self._was_applied(result))
        lost = ops.any(ops.greater(ops.stack(found), 0))
        return ops.logical_and(
            ops.logical_and(skipped, lost), ops.logical_not(finite)
        )

    def _count_logged(self, result):
        """Counts the losses that a step returns, if no metric was given any."""
        own = self._own_losses
        known = result.value(own[0].variable) if own else None
        if known is None or self._inside.counted:
            return
        logs = result.logs if isinstance(result.logs, dict) else {}
        named = {n: x for n, x in logs.items() if n.endswith("loss")}
        kinds = [own[0].kinds_of(x) for x in named.values() if is_number(x)]
        if kinds:
            worst = ops.max(ops.stack(kinds), axis=0)
            result.assign(own[0].variable, ops.add(known, worst))

    def _optimizers(self):
        return [
            optimizer
            for optimizer in optimizers_of(self._model).values()
            if isinstance(optimizer, LossScaleOptimizer) and optimizer.built
        ]

    def _was_applied(self, result):
        """Whether no optimizer skipped this step, as far as it can be known."""
        counts = [result.value(o.history.counts) for o in self._optimizers()]
        applied = [
            ops.equal(c[CONSECUTIVE], 0) for c in counts if c is not None
        ]
        return ops.all(ops.stack(applied)) if applied else True

    # Metrics.

    def _guard_metric(self, metric):
        parts = getattr(metric, "metrics", None)
        if isinstance(parts, list):
            self._guard_on_build(metric)
            for part in parts:
                self._guard_metric(part)
            return
        if (metric, "update_state") in self._in_steps:
            return
        if self._weights_lost is None:
            self._weights_lost = self._variables.add(metric, "weights_lost")
        last = LastResult(self._variables, metric)
        if self._is_loss(metric):
            seen = AveragedLosses(self._losses)
            update = self._mean_of_finite_losses(metric)
        else:
            seen, losses = SeenBatches(self._variables, metric), None
            if self._own_step and metric.name.endswith("loss"):
                self._own_losses.append(losses := self._count_of(metric))
            update = self._update_if_finite(metric, seen, losses)
        result, reset_state = metric.result, metric.reset_state
        # In this order: a metric may be built, and so guarded, within a step.
        self._in_fit.add(metric, "result", self._nan_if_unknown(result, seen))
        self._in_fit.add(
            metric,
            "reset_state",
            self._reset_keeping_last_result(last, reset_state, seen),
        )
        self._in_steps.add(metric, "update_state", update)
        self._in_steps.add(
            metric, "result", unless(seen.none_good_here, last.value, result)
        )

    def _reset_keeping_last_result(self, last, reset_state, seen):
        @functools.wraps(reset_state)
        def reset():
            last.keep(self._batches)
            reset_state()
            seen.reset()
            self._weights_lost.assign(0)

        return reset

    def _nan_if_unknown(self, result, seen):
        def unknown():
            bad, lost = seen.only_bad(), ops.greater(self._weights_lost, 0)
            skipped = ops.logical_and(bad, ops.logical_not(lost))
            if active.step().to_host_bool(skipped) is True:
                self.epoch_was_skipped = True
            return ops.logical_or(bad, lost)

        return unless(unknown, lambda: math.nan, result)

    def _guard_on_build(self, container):
        if (
            container is None
            or container.built
            or (container, "build") in self._in_fit
        ):
            return
        build = container.build

        @functools.wraps(build)
        def build_and_guard(*args, **kwargs):
            build(*args, **kwargs)
            for part in container.metrics:
                self._guard_metric(part)

        self._in_fit.add(container, "build", build_and_guard)

    def _mean_of_finite_losses(self, loss_tracker):
        update_state = loss_tracker.update_state

        @functools.wraps(update_state)
        def guarded(values, sample_weight=None):
            loss = ops.convert_to_tensor(values)
            known = active.step().known_finite(loss)
            finite = self._inside.loss_is_finite = known or _all_finite(loss)
            if finite is True:
                return update_state(loss, sample_weight=sample_weight)
            loss_is(loss)
            self._losses.add(loss)
            # A third of the operations of putting its state back: on
            # TensorFlow op by op that is 1% of a step of 40 small layers.
            if sample_weight is None:
                sample_weight = ops.ones_like(loss)
            return update_state(
                ops.where(finite, loss, 0),
                sample_weight=ops.where(finite, sample_weight, 0),
            )

        return guarded

    def _update_if_finite(self, metric, seen, losses):
        update_state = metric.update_state

        @functools.wraps(update_state)
        def guarded(*args, **kwargs):
            if losses is not None and args and is_number(args[0]):
                self._inside.counted = True
                losses.add(args[0])
            # Not known to one that is updated before the loss.
            finite = self._inside.loss_is_finite
            if finite is True:
                returned = update_state(*args, **kwargs)
                seen.add(finite)
                return returned
            # A copy, since torch writes into the variable's own memory.
            before = {id(v): ops.copy(v.value) for v in metric.variables}
            returned = update_state(*args, **kwargs)
            if finite is None:
                finite = are_finite(metric.variables)
            for variable in metric.variables:
                # Some metrics make theirs only now, of zeros.
                old = before.get(id(variable), 0)
                variable.assign(ops.where(finite, variable.value, old))
            seen.add(finite)
            return returned

        return guarded


def _all_finite(tensor):
    finite = ops.isfinite(tensor)
    return finite if finite.shape == () else ops.all(finite)
