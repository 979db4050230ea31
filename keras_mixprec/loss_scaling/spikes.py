"""Skips steps whose gradients are far larger than in earlier steps."""

import math
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of

# A step can count as a spike only after `ENOUGH` applied steps. After `MOST`
# spikes in a row, the optimizer accepts steps with larger gradients.
ENOUGH, MOST = 64, 128

# The gradient norm of a spike is over `FACTOR` times the largest norm so far,
# as in Megatron's rerun state machine. A batch of a rare class is not a spike,
# because its gradients are only about as large as in the first steps.
FACTOR = 10.0

# Indices of the counters in the variable `SpikeGate.counts`.
_TAKEN, _SKIPPED, _IN_A_ROW = range(3)


class Spikes(NamedTuple):
    """The steps that a gate has skipped.

    Attributes:
        skipped: Int. Number of skipped steps.
        in_a_row: Int. Number of skipped steps since the last applied step.
        last: Float. Gradient norm of the last skipped step, as a multiple of
            the largest norm before it.
    """

    skipped: int
    in_a_row: int
    last: float


class SpikeGate:
    """Decides inside a train step whether its gradients are a spike.

    The size of a step is the unscaled norm of all its gradients together. The
    gate skips nothing before `start`.

    Args:
        add_variable: Function `(name, shape, dtype, value=0)` that creates and
            tracks a variable of the optimizer.
    """

    def __init__(self, add_variable):
        self.largest = add_variable("largest_gradients", (), "float32")
        self.counts = add_variable("spike_counts", (3,), "int32")
        self.last = add_variable("last_spike", (), "float32")
        self._factor = add_variable("spike_factor", (), "float32", math.inf)

    def start(self):
        """Starts to skip spikes, and forgets all earlier steps."""
        for variable in (self.largest, self.counts, self.last):
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        self._factor.assign(FACTOR)

    def stop(self):
        """Stops skipping spikes."""
        self._factor.assign(math.inf)

    def is_spike(self, size: Any):
        """Returns whether a step is a spike, as a boolean scalar tensor.

        Args:
            size: float32 scalar. The gradient norm of the step.
        """
        taken, _, in_a_row = self._counts()
        largest = ops.convert_to_tensor(self.largest)
        limit = ops.convert_to_tensor(self._factor) * largest
        large = ops.logical_and(ops.greater(size, limit), ops.greater(limit, 0))
        compared = ops.logical_and(
            ops.greater_equal(taken, ENOUGH), ops.less(in_a_row, MOST)
        )
        return ops.logical_and(compared, large)

    def record(self, size, finite, ordinary):
        """Counts a step.

        Args:
            size: float32 scalar. The gradient norm of the step.
            finite: Boolean, or a boolean scalar tensor.
            ordinary: Boolean, or a boolean scalar tensor. False for a spike.
        """
        taken, skipped, in_a_row = self._counts()
        largest, last = map(ops.convert_to_tensor, (self.largest, self.last))
        spike = ops.logical_and(finite, ops.logical_not(ordinary))
        applied = ops.logical_and(finite, ordinary)
        ratio = size / ops.maximum(largest, 1e-30)
        self.last.assign(ops.where(spike, ratio, last))
        larger = ops.maximum(largest, size)
        self.largest.assign(ops.where(applied, larger, largest))
        one, no = ops.cast(spike, "int32"), ops.cast(applied, "int32")
        self._write(taken + no, skipped + one, (in_a_row + one) * (1 - no))

    def end_streak(self, accept: bool):
        """Restarts the count of skipped steps in a row.

        Args:
            accept: Boolean. If `True`, the gate accepts gradients of any size
                until the next applied step.
        """
        taken, skipped, _ = self._counts()
        self._write(taken, skipped, ops.full_like(taken, MOST if accept else 0))

    def read(self) -> Spikes:
        """Returns the steps that were skipped since `start`."""
        read = active.step().read
        _, skipped, in_a_row = map(int, read(self.counts))
        return Spikes(skipped, in_a_row, float(read(self.last)))

    def limit(self) -> float:
        """Returns the gradient norm above which the next step is a spike."""
        return FACTOR * float(active.step().read(self.largest))

    def _counts(self):
        counts = ops.convert_to_tensor(self.counts)
        return counts[_TAKEN], counts[_SKIPPED], counts[_IN_A_ROW]

    def _write(self, *counts):
        self.counts.assign(ops.stack(counts))


def skip_spikes(model: keras.Model) -> bool:
    """Makes each optimizer that scales a model's loss skip gradient spikes.

    Args:
        model: A compiled `keras.Model`, with built optimizers.

    Returns:
        `True` if the train step must be recompiled.
    """
    optimizers = [
        optimizer
        for optimizer in optimizers_in_step(model)
        if hasattr(optimizer, "skip_spikes") and optimizer.built
    ]
    return any([optimizer.skip_spikes() for optimizer in optimizers])


def gates_of(model: keras.Model) -> list:
    """Returns the `SpikeGate`s of a model's optimizers."""
    found = [getattr(o, "spikes", None) for o in optimizers_in_step(model)]
    return [gate for gate in found if gate is not None]


def optimizers_in_step(model) -> list:
    """Returns the optimizers whose variables a train step may write."""
    found = [*optimizers_of(model).values()]
    if keras.backend.backend() == "jax":
        # On JAX, the state of a compiled step contains the variables of
        # `model.optimizer` only.
        own = getattr(model, "optimizer", None)
        found = [optimizer for optimizer in found if optimizer is own]
    return found
