"""Keeping the batches whose steps were skipped."""

import numpy as np
from keras import ops

from keras_mixprec.callbacks.carry_on import carry_on_without
from keras_mixprec.callbacks.held_batch import HeldBatch
from keras_mixprec.diagnosis.failing_batch import FailingBatch
from keras_mixprec.numerics.calls import seed_states


class Recorder:
    """Holds on to the batch of each step until that has succeeded.

    Nothing of it is copied before it fails, random state apart.

    Args:
        count: Int. How many failing batches to keep, the first ones.

    Attributes:
        kept: List of `FailingBatch`.
    """

    def __init__(self, count):
        self.kept = []
        self._count = count
        self._held = HeldBatch()

    @property
    def full(self) -> bool:
        """Whether there is no room for another."""
        return len(self.kept) >= self._count

    def hold(self, model, step: int, optimizers: dict):
        """Holds the next batch that `model` trains on, the `step`th.

        Args:
            model: The `keras.Model`.
            step: Int.
            optimizers: Dict from name to `LossScaleOptimizer`.
        """

        def describe():
            seeds = [np.array(_array(v)) for v in seed_states(model)]
            scales = {n: float(o.loss_scale) for n, o in optimizers.items()}
            return step, seeds, scales

        try:
            self._held.hold(model, describe)
        except NotImplementedError as reason:
            self._count = 0
            carry_on_without("keep failing batches", reason)

    def settle(self, model, optimizers: dict):
        """Keeps the batch of the last step if that was skipped."""
        held = self._held.take()
        if held and any(o.last_step_skipped for o in optimizers.values()):
            batch, described = held
            self.kept.append(FailingBatch.of(model, batch, *described))

    def end_epoch(self):
        """An epoch of unknown length ends with a call without a batch."""
        self._held.end_epoch()

    def disarm(self):
        """Holds no batch any more."""
        self._held.disarm()


def _array(variable):
    return ops.convert_to_numpy(variable.value)
