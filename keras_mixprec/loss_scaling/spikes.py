"""Skips steps whose gradients are far larger than those of the steps before."""

import math
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of

# A step is compared with all that were taken, once there are enough. After so
# many skipped ones in a row larger gradients count as usual.
ENOUGH, MOST = 64, 128

# A spike is larger than the largest of them times this, as in the rerun state
# machine of Megatron. A rare class stays far below, as its gradients are about
# as large as those of the first steps.
FACTOR = 10.0

# Columns of `counts`.
_TAKEN, _SKIPPED, _IN_A_ROW = range(3)


class Spikes(NamedTuple):
    """What a gate has skipped.

    Attributes:
        skipped: Int. Steps.
        in_a_row: Int. Those since the last step that was taken.
        last: Float. The size of the gradients of the last one, as a multiple of
            the largest before.
    """

    skipped: int
    in_a_row: int
    last: float


class SpikeGate:
    """Decides in the step itself whether its gradients are a spike.

    The size of a step's gradients is the norm of all of them together, without
    the loss scale. Nothing is skipped before `start`.

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
        """Skips spikes from now on, compared with steps from now on."""
        for variable in (self.largest, self.counts, self.last):
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        self._factor.assign(FACTOR)

    def stop(self):
        """Skips no step any more."""
        self._factor.assign(math.inf)

    def is_spike(self, size: Any):
        """Returns whether a step is a spike: a boolean scalar tensor.

        Args:
            size: float32 scalar. The size of its gradients.
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
            size: float32 scalar. The size of its gradients.
            finite: Boolean, or a boolean scalar tensor.
            ordinary: Same as `finite`: whether it is not a spike.
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
        """Counts spikes in a row from here on.

        Args:
            accept: Boolean. Whether gradients as large as the next ones count
                as usual.
        """
        taken, skipped, _ = self._counts()
        self._write(taken, skipped, ops.full_like(taken, MOST if accept else 0))

    def read(self) -> Spikes:
        """Returns what was skipped since `start`."""
        read = active.step().read
        _, skipped, in_a_row = map(int, read(self.counts))
        return Spikes(skipped, in_a_row, float(read(self.last)))

    def limit(self) -> float:
        """Returns the size beyond which gradients are a spike now."""
        return FACTOR * float(active.step().read(self.largest))

    def _counts(self):
        counts = ops.convert_to_tensor(self.counts)
        return counts[_TAKEN], counts[_SKIPPED], counts[_IN_A_ROW]

    def _write(self, *counts):
        self.counts.assign(ops.stack(counts))


def skip_spikes(model: keras.Model) -> bool:
    """Lets the optimizers of a model that scale its loss skip spikes.

    Args:
        model: A compiled `keras.Model`, with built optimizers.

    Returns:
        Whether steps have to be compiled again for it.
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
        # No others are in the state of a compiled step.
        own = getattr(model, "optimizer", None)
        found = [optimizer for optimizer in found if optimizer is own]
    return found
