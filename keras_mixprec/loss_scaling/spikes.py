"""Skips steps whose gradients are far larger than those of the steps before."""

import math
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of

# A step is compared with the last `WINDOW` applied steps, once there are
# `ENOUGH`. After `WINDOW` spikes in a row, larger gradients count as usual.
# OLMo-core's `SkipStepOptimizer` uses the same window.
WINDOW, ENOUGH = 128, 64

# How many times the largest of them is a spike: what the rerun state machine of
# Megatron calls one.
FACTOR = 10.0

# Columns of `counts`.
_TAKEN, _SKIPPED, _IN_A_ROW = range(3)


class Spikes(NamedTuple):
    """What a gate has skipped.

    Attributes:
        skipped: Int. Steps.
        in_a_row: Int. Those since the last step that was taken.
        last: Float. How many times as large as the largest of the steps before
            the gradients of the last one were.
    """

    skipped: int
    in_a_row: int
    last: float


class SpikeGate:
    """Decides in the step itself whether its gradients are a spike.

    The size of a step's gradients is the norm of all of them together, without
    the loss scale. Nothing is skipped before `open`.

    Args:
        add_variable: Function `(name, shape, dtype, value=0)` that creates and
            tracks a variable of the optimizer.
    """

    def __init__(self, add_variable):
        self.sizes = add_variable("gradient_sizes", (WINDOW,), "float32")
        self.counts = add_variable("spike_counts", (3,), "int32")
        self.last = add_variable("last_spike", (), "float32")
        self._factor = add_variable("spike_factor", (), "float32", math.inf)

    def start(self):
        """Skips spikes from now on, compared with steps from now on."""
        for variable in (self.sizes, self.counts, self.last):
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        self._factor.assign(FACTOR)

    def stop(self):
        """Skips none any more."""
        self._factor.assign(math.inf)

    def is_spike(self, size: Any):
        """Whether a step is one: a boolean scalar tensor.

        Args:
            size: float32 scalar. The size of its gradients.
        """
        counts = ops.convert_to_tensor(self.counts)
        sizes = ops.convert_to_tensor(self.sizes)
        limit = ops.convert_to_tensor(self._factor) * ops.max(sizes)
        compared = ops.logical_and(
            ops.greater_equal(counts[_TAKEN], ENOUGH),
            ops.less(counts[_IN_A_ROW], WINDOW),
        )
        large = ops.logical_and(ops.greater(size, limit), ops.greater(limit, 0))
        return ops.logical_and(compared, large)

    @property
    def skips(self):
        """Whether the last step was a spike: a boolean scalar tensor."""
        return ops.greater(ops.convert_to_tensor(self.counts)[_IN_A_ROW], 0)

    def record(self, size, finite, ordinary):
        """Counts a step.

        Args:
            size: float32 scalar. The size of its gradients.
            finite: Boolean, or a boolean scalar tensor.
            ordinary: As `finite`. False for a spike.
        """
        counts = ops.convert_to_tensor(self.counts)
        taken, skipped, in_a_row = counts[0], counts[1], counts[2]
        sizes = ops.convert_to_tensor(self.sizes)
        spike = ops.logical_and(finite, ops.logical_not(ordinary))
        applied = ops.logical_and(finite, ordinary)
        anew = ops.logical_and(applied, ops.greater_equal(in_a_row, WINDOW))
        ratio = size / ops.maximum(ops.max(sizes), 1e-30)
        last = ops.convert_to_tensor(self.last)
        self.last.assign(ops.where(spike, ratio, last))
        taken = ops.where(anew, 0, taken)
        row = ops.equal(ops.arange(WINDOW, dtype="int32"), taken % WINDOW)
        sizes = ops.where(anew, ops.zeros_like(sizes), sizes)
        row = ops.logical_and(row, applied)
        self.sizes.assign(ops.where(row, size, sizes))
        one, no = ops.cast(spike, "int32"), ops.cast(applied, "int32")
        new = taken + no, skipped + one, (in_a_row + one) * (1 - no)
        self.counts.assign(ops.stack(new))

    def end_streak(self):
        """Counts spikes in a row from here on."""
        counts = ops.convert_to_tensor(self.counts)
        self.counts.assign(ops.stack([*counts[:_IN_A_ROW], 0 * counts[0]]))

    def read(self) -> Spikes:
        """Returns what was skipped since `start`."""
        read = active.step().read
        _, skipped, in_a_row = map(int, read(self.counts))
        return Spikes(skipped, in_a_row, float(read(self.last)))

    def limit(self) -> float:
        """Returns the size beyond which gradients are a spike now."""
        return FACTOR * float(active.step().read(self.sizes).max())


def skip_spikes(model: keras.Model) -> bool:
    """Lets the optimizers of a model that scale its loss skip spikes.

    Args:
        model: A compiled `keras.Model`, with built optimizers.

    Returns:
        Whether steps have to be compiled again for it.
    """
    optimizers = [
        optimizer
        for optimizer in _in_state(model)
        if hasattr(optimizer, "skip_spikes") and optimizer.built
    ]
    return any([optimizer.skip_spikes() for optimizer in optimizers])


def gates_of(model: keras.Model) -> list:
    """Returns the `SpikeGate`s of a model's optimizers."""
    found = [getattr(o, "spikes", None) for o in _in_state(model)]
    return [gate for gate in found if gate is not None]


def _in_state(model):
    found = [*optimizers_of(model).values()]
    if keras.backend.backend() == "jax":
        # No others are in the state of a compiled step.
        own = getattr(model, "optimizer", None)
        found = [optimizer for optimizer in found if optimizer is own]
    return found
