"""Metrics that a skipped step does not turn into NaN.

One batch whose forward pass overflows makes Keras' running means NaN for the
rest of the epoch, although the optimizer skipped the step. `EarlyStopping`,
`ReduceLROnPlateau`, `ModelCheckpoint(save_best_only=True)` and
`TerminateOnNaN` then act on a fault that is over.
"""

import functools
import threading

import keras
from keras import ops

from keras_mixprec.backend import step as backend_step
from keras_mixprec.callbacks.state_guard import guard_state
from keras_mixprec.formats import get_format
from keras_mixprec.loss_scaling.inputs import training_on

# What a metric without any finite batch reports. It is no NaN, which would
# become the "best" value of a callback for ever, and never the best itself.
WORST = get_format("float32").maximum


# What a metric has seen since it was reset.
_NOTHING, _ONLY_BAD, _SOME_GOOD = range(3)


class MetricGuard:
    """Keeps batches whose loss is not finite out of training metrics.

    After such a batch a metric has the state that it had before. Metrics that
    are updated before the loss is known, and those of a `train_step` of the
    user's own, judge by their own state. Everything else is as before, bit
    for bit: outside `train_step`, in `evaluate`, NaN is the truth about the
    weights.

    The state that layers write themselves is guarded as well.

    Attributes:
        enabled: Boolean. Whether training steps are guarded. Compiled
            functions keep what it was when they were traced.
    """

    def __init__(self):
        self.enabled = False
        self._nonfinite_losses = self._nonfinite_before = None
        self._nonfinite_earlier = 0
        self._loss_tracker = None
        # The replicas of a `MirroredStrategy` are threads that take turns.
        self._inside = threading.local()

    def guard(self, model) -> bool:
        """Guards metrics and state of `model`; returns if any was new."""
        fresh = self._guard_step(model)
        fresh |= guard_state(model, self._in_training)
        # Keras' own step updates it first. Another may do so within
        # `jax.grad`, whose tensors must not be used outside.
        if type(model).train_step is keras.Model.train_step:
            fresh |= self._count_on(getattr(model, "_loss_tracker", None))
        for metric in model.metrics:
            fresh |= self._guard_metric(metric)
        # The trackers of several outputs' losses appear when it is built.
        self._guard_on_build(getattr(model, "_compile_loss", None))
        return fresh

    @property
    def nonfinite_losses(self) -> int:
        """How many batches of this process had a loss that is not finite, ever.

        0 for a `train_step` of the user's own.
        """
        count = self._nonfinite_losses
        now = 0 if count is None else backend_step.current().read_sum(count)
        return self._nonfinite_earlier + now

    @property
    def counters(self) -> list:
        """The variable that is read for it, if there is one."""
        count = self._nonfinite_losses
        return [] if count is None else [count]

    def _in_training(self):
        return getattr(self._inside, "training", False)

    def _count_on(self, loss_tracker):
        # `compile` makes another one.
        if loss_tracker is None or loss_tracker is self._loss_tracker:
            return False
        self._nonfinite_earlier = self.nonfinite_losses
        self._loss_tracker = loss_tracker
        # The tracker is a `Mean`, which resets its own two variables only.
        self._nonfinite_losses, self._nonfinite_before = (
            loss_tracker.add_variable((), "zeros", name=name)
            for name in ("nonfinite_losses", "nonfinite_losses_before")
        )
        return True

    def _guard_step(self, model):
        if "train_step" in vars(model):
            return False
        train_step = model.train_step

        @functools.wraps(train_step)
        def guarded(*args, **kwargs):
            self._inside.training = self.enabled
            self._inside.loss_is_finite = None
            try:
                # JAX passes the state first.
                with training_on(args[-1] if args else None):
                    return train_step(*args, **kwargs)
            finally:
                self._inside.training = False
                self._inside.loss_is_finite = None

        model.train_step = guarded
        return True

    def _guard_metric(self, metric):
        parts = getattr(metric, "metrics", None)
        if isinstance(parts, list):
            self._guard_on_build(metric)
            return any([self._guard_metric(part) for part in parts])
        if "update_state" in vars(metric):
            return False
        if metric is self._loss_tracker:
            metric.update_state = self._averaging_finite(metric)
            metric.reset_state = _then(metric.reset_state, self._count_anew)
            metric.result = _never_empty(metric, self._averaged_none)
            return True
        seen = metric.add_variable((), "zeros", name="seen_by_guard")
        metric.update_state = self._kept_finite(metric, seen)
        metric.reset_state = _then(
            metric.reset_state, lambda: seen.assign(_NOTHING)
        )
        metric.result = _never_empty(metric, lambda: ops.equal(seen, _ONLY_BAD))
        return True

    def _count_anew(self):
        # A copy: JAX gives each buffer away once.
        self._nonfinite_before.assign(ops.copy(self._nonfinite_losses.value))

    def _averaged_none(self):
        """Whether there were losses, but none finite."""
        empty = ops.equal(self._loss_tracker.count, 0)
        if self._in_training():  # There is one now.
            return empty
        bad = ops.greater(self._nonfinite_losses, self._nonfinite_before)
        return ops.logical_and(empty, bad)

    def _guard_on_build(self, container):
        if container is None or container.built or "build" in vars(container):
            return
        build = container.build

        @functools.wraps(build)
        def build_and_guard(*args, **kwargs):
            build(*args, **kwargs)
            for part in container.metrics:
                self._guard_metric(part)

        container.build = build_and_guard

    def _averaging_finite(self, loss_tracker):
        update_state = loss_tracker.update_state

        @functools.wraps(update_state)
        def guarded(values, sample_weight=None):
            if not self._in_training():
                return update_state(values, sample_weight=sample_weight)
            loss = ops.convert_to_tensor(values)
            known = backend_step.current().known_finite(loss)
            finite = self._inside.loss_is_finite = known or _all_finite(loss)
            if finite is True:
                return update_state(loss, sample_weight=sample_weight)
            self._nonfinite_losses.assign_add(ops.where(finite, 0.0, 1.0))
            # A third of the operations of putting its state back: on
            # TensorFlow op by op that is 1% of a step of 40 small layers.
            if sample_weight is None:
                sample_weight = ops.ones_like(loss)
            return update_state(
                ops.where(finite, loss, 0),
                sample_weight=ops.where(finite, sample_weight, 0),
            )

        return guarded

    def _kept_finite(self, metric, seen):
        update_state = metric.update_state

        @functools.wraps(update_state)
        def guarded(*args, **kwargs):
            if not self._in_training():
                return update_state(*args, **kwargs)
            # Not known to one that is updated before the loss.
            finite = self._inside.loss_is_finite
            if finite is True:
                returned = update_state(*args, **kwargs)
                seen.assign(_SOME_GOOD)
                return returned
            # A copy, since torch writes into the variable's own memory.
            before = {id(v): ops.copy(v.value) for v in metric.variables}
            returned = update_state(*args, **kwargs)
            if finite is None:
                finite = _has_finite_state(metric)
            for variable in metric.variables:
                # Some metrics make theirs only now, of zeros.
                old = before.get(id(variable), 0)
                variable.assign(ops.where(finite, variable.value, old))
            bad = ops.maximum(seen.value, _ONLY_BAD)
            seen.assign(ops.where(finite, float(_SOME_GOOD), bad))
            return returned

        return guarded


def _all_finite(tensor):
    finite = ops.isfinite(tensor)
    return finite if finite.shape == () else ops.all(finite)


def _has_finite_state(metric):
    return ops.all(
        ops.stack([ops.all(ops.isfinite(v)) for v in metric.variables])
    )


def _then(function, more):
    @functools.wraps(function)
    def both():
        function()
        more()

    return both


def _never_empty(metric, only_bad):
    result = metric.result
    worst = -WORST if getattr(metric, "_direction", "down") == "up" else WORST

    @functools.wraps(result)
    def guarded(*args, **kwargs):
        value = result(*args, **kwargs)
        if not _is_float_tensor(value):
            return value
        return ops.where(only_bad(), ops.cast(worst, value.dtype), value)

    return guarded


def _is_float_tensor(value):
    return ops.is_tensor(value) and "float" in str(value.dtype)
