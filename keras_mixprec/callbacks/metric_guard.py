"""Metrics that a skipped step does not turn into NaN.

One batch whose forward pass overflows makes Keras' running means NaN for the
rest of the epoch, although the optimizer skipped the step. `EarlyStopping`,
`ReduceLROnPlateau`, `ModelCheckpoint(save_best_only=True)` and
`TerminateOnNaN` then act on a fault that is over.
"""

import functools

from keras import ops

from keras_mixprec.formats import get_format

# What a metric without any finite batch reports. It is no NaN, which would
# become the "best" value of a callback for ever, and never the best itself.
WORST = get_format("float32").maximum


class MetricGuard:
    """Keeps non-finite batches out of a model's training metrics.

    A metric whose state a batch would make non-finite keeps the state that it
    had. Everything else is as before, bit for bit. Guarding lasts until the
    model is compiled again; it acts while `active` is true, and compiled
    functions keep what it was when they were traced.

    Attributes:
        active: Boolean. Set while training, not while evaluating: NaN in
            validation is the truth about the weights.
    """

    def __init__(self):
        self.active = False

    def guard(self, model) -> bool:
        """Guards the metrics of `model`; returns whether any was new."""
        fresh = False
        for metric in model.metrics:
            fresh |= self._guard_metric(metric)
        # The trackers of several outputs' losses appear when it is built.
        self._guard_on_build(getattr(model, "_compile_loss", None))
        return fresh

    def _guard_metric(self, metric):
        parts = getattr(metric, "metrics", None)
        if isinstance(parts, list):
            self._guard_on_build(metric)
            return any([self._guard_metric(part) for part in parts])
        if "update_state" in vars(metric):
            return False
        metric.update_state = self._kept_finite(metric, metric.update_state)
        metric.result = self._never_empty(metric, metric.result)
        return True

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

    def _kept_finite(self, metric, update_state):
        @functools.wraps(update_state)
        def guarded(*args, **kwargs):
            if not self.active:
                return update_state(*args, **kwargs)
            # A copy, since torch writes into the variable's own memory.
            before = [ops.copy(v.value) for v in metric.variables]
            returned = update_state(*args, **kwargs)
            finite = ops.all(
                ops.stack([ops.all(ops.isfinite(v)) for v in metric.variables])
            )
            for variable, old in zip(metric.variables, before, strict=True):
                variable.assign(ops.where(finite, variable.value, old))
            return returned

        return guarded

    def _never_empty(self, metric, result):
        worst = (
            -WORST if getattr(metric, "_direction", "down") == "up" else WORST
        )

        @functools.wraps(result)
        def guarded(*args, **kwargs):
            value = result(*args, **kwargs)
            if not self.active or not _is_float_tensor(value):
                return value
            return ops.where(
                _is_empty(metric), ops.cast(worst, value.dtype), value
            )

        return guarded


def _is_empty(metric):
    zero = [ops.all(ops.equal(v, 0)) for v in metric.variables]
    return ops.all(ops.stack(zero))


def _is_float_tensor(value):
    return ops.is_tensor(value) and "float" in str(value.dtype)
