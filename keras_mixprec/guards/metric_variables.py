"""What metrics hold, whether it was finite, and what is shown instead."""

import functools
import math

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import count_kinds
from keras_mixprec.keras_internals import metric_variables


class LentVariables:
    """Variables that metrics have between `put` and `take`.

    On JAX a step writes no others than those that the model's layers,
    optimizer and metrics have.
    """

    def __init__(self):
        self._lent = []

    def add(self, metric, name: str, shape: tuple = ()):
        """Returns a new variable of a metric, of zeros.

        Args:
            metric: A `keras.metrics.Metric`.
            name: String.
            shape: Tuple of ints. Defaults to that of a scalar.
        """
        variable = metric.add_variable(shape, "zeros", name=name)
        position = len(metric_variables(metric)) - 1
        self._lent.append((metric, position, variable))
        return variable

    def put(self):
        """Gives the metrics their variables again."""
        for metric, position, variable in self._lent:
            metric_variables(metric).insert(position, variable)

    def take(self):
        """Takes the variables away from the metrics.

        At their places, since a compiled step goes by the order.
        """
        for metric, _, variable in reversed(self._lent):
            own = metric_variables(metric)
            own[:] = [v for v in own if v is not variable]

    def clear(self, *but):
        """Sets all variables to 0, those in `but` apart."""
        kept = {id(variable) for variable in but}
        for _, _, variable in self._lent:
            if id(variable) not in kept:
                # A step that failed to compile may have left no value.
                variable.assign(ops.zeros(variable.shape, variable.dtype))


class LastResult:
    """Keeps what a metric reported last, NaN before.

    Args:
        variables: `LentVariables`, where it is kept.
        metric: A `keras.metrics.Metric`.
    """

    def __init__(self, variables: LentVariables, metric):
        self._metric = metric
        self._batches = 0
        # A sum and a count: 0 / 0 is NaN, and each replica has its share.
        self._kept = variables.add(metric, "last_result", (2,))

    def keep(self, batches: int):
        """Keeps the result of now, if there was training in between.

        Args:
            batches: Int. How many batches the model has trained on.
        """
        if batches == self._batches:
            return  # What a validation has left.
        self._batches = batches
        value = self._metric.result()
        if ops.is_tensor(value) and value.shape == ():
            value = ops.cast(value, self._kept.dtype)
            self._kept.assign(ops.stack([value, ops.ones_like(value)]))

    def value(self):
        """Returns what is kept, a scalar tensor."""
        return ops.divide(self._kept[0], self._kept[1])


# Added to a loss, the sum is NaN: if the loss is NaN, NaN or inf, NaN or -inf.
_PROBES = np.array([0, -np.inf, np.inf], "float32")


class NonfiniteLosses:
    """Counts batches with a loss that is not finite, by its kind.

    Args:
        variables: `LentVariables`, where the counters are created.
        tracker: The `keras.metrics.Mean` of the model's losses.
        earlier: Dict from each kind to what was counted before.

    Attributes:
        tracker: As given.
        variable: The counter.
    """

    def __init__(self, variables: LentVariables, tracker, earlier: dict):
        self.tracker = tracker
        self._earlier = earlier
        # The tracker is a `Mean`, which resets its own two variables only.
        self.variable, self._before = (
            variables.add(tracker, name, _PROBES.shape)
            for name in ("nonfinite_losses", "nonfinite_losses_before")
        )

    def add(self, loss):
        """Counts a loss, unless it is finite.

        Args:
            loss: Tensor, or a float.
        """
        self.variable.assign_add(self.kinds_of(loss))

    def kinds_of(self, loss):
        """Returns what to add to the counter for a loss.

        Args:
            loss: As for `add`.
        """
        total = ops.cast(loss, "float32")
        total = total if total.shape == () else ops.sum(total)
        return ops.cast(ops.isnan(ops.add(total, _PROBES)), "float32")

    def count_from_here(self):
        """Starts a new epoch for `any`."""
        # A copy: JAX gives each buffer away once.
        self._before.assign(ops.copy(self.variable.value))

    def any(self):
        """Whether any was counted in this epoch, a boolean tensor."""
        return ops.any(ops.greater(self.variable, self._before))

    def read(self) -> dict:
        """Returns how many there were of each kind, on this process."""
        read = active.step().read_sum(self.variable)
        nan, nan_or_inf, nan_or_minus_inf = read
        now = count_kinds((nan_or_inf - nan, nan_or_minus_inf - nan, nan))
        return {kind: n + now[kind] for kind, n in self._earlier.items()}


# What replicas have seen is added up, so that bad batches of up to 1,000 of
# them make no good one.
_NOTHING, _ONLY_BAD, _SOME_GOOD = 0.0, 2.0**-10, 1.0


class SeenBatches:
    """Keeps whether a metric has seen good batches, or bad ones only.

    Args:
        variables: `LentVariables`, where it is kept.
        metric: A `keras.metrics.Metric`.
    """

    def __init__(self, variables: LentVariables, metric):
        self._seen = variables.add(metric, "seen_by_guard")

    def add(self, finite):
        """Takes note of a batch.

        Args:
            finite: Boolean, or a boolean tensor. Whether it was a good one.
        """
        if finite is True:
            self._seen.assign(_SOME_GOOD)
            return
        bad = ops.maximum(self._seen.value, _ONLY_BAD)
        self._seen.assign(ops.where(finite, _SOME_GOOD, bad))

    def reset(self):
        """Forgets all batches."""
        self._seen.assign(_NOTHING)

    def none_good_here(self):
        """Whether this replica has seen bad batches only."""
        return ops.equal(self._seen, _ONLY_BAD)

    def only_bad(self):
        """Whether all batches were bad, if there were any."""
        seen_any = ops.greater(self._seen, _NOTHING)
        return ops.logical_and(seen_any, ops.less(self._seen, _SOME_GOOD))


class AveragedLosses:
    """The same of the metric that averages the losses, without a variable.

    Args:
        losses: `NonfiniteLosses`, which count its bad batches.
    """

    def __init__(self, losses: NonfiniteLosses):
        self._losses = losses
        self.reset = losses.count_from_here

    def none_good_here(self):
        """Whether this replica has averaged nothing."""
        return ops.equal(self._losses.tracker.count, 0)

    def only_bad(self):
        """Whether there were losses, but none finite."""
        return ops.logical_and(self.none_good_here(), self._losses.any())


def unless(condition, instead, result):
    """Another `result`, with a number instead where the condition holds."""

    @functools.wraps(result)
    def guarded(*args, **kwargs):
        value = result(*args, **kwargs)
        if not _is_float_tensor(value):
            return value
        return ops.where(condition(), ops.cast(instead(), value.dtype), value)

    return guarded


def nan_where(lost, value):
    """Returns NaN where weights were lost, if `value` is a float tensor."""
    if not _is_float_tensor(value):
        return value
    return ops.where(
        ops.greater(lost, 0), ops.cast(math.nan, value.dtype), value
    )


def is_number(value) -> bool:
    """Returns whether a step may have logged it as a loss."""
    return isinstance(value, float) or _is_float_tensor(value)


def _is_float_tensor(value):
    return ops.is_tensor(value) and "float" in str(value.dtype)
