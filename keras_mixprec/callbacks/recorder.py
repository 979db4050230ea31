"""Keeping the batches whose steps were skipped."""

import numpy as np
from keras import ops

from keras_mixprec.backend import batches as backend_batches
from keras_mixprec.callbacks.carry_on import carry_on_without
from keras_mixprec.callbacks.next_call import NextCall
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
        self._held = None
        self._next_call = NextCall()

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

        def look(batch):
            self._next_call.disarm()
            seeds = [np.array(_array(v)) for v in seed_states(model)]
            scales = {n: float(o.loss_scale) for n, o in optimizers.items()}
            self._held = batch, step, seeds, scales

        try:
            if getattr(model, "steps_per_execution", 1) > 1:
                raise NotImplementedError("several steps in one execution")
            tapped = backend_batches.current().tapped(
                model, model.train_function, look
            )
        except NotImplementedError as reason:
            self._count = 0
            carry_on_without("keep failing batches", reason)
            return
        self._next_call.arm(model, tapped)

    def settle(self, model, optimizers: dict):
        """Keeps the batch of the last step if that was skipped."""
        held, self._held = self._held, None
        if held and any(o.last_step_skipped for o in optimizers.values()):
            self.kept.append(FailingBatch.of(model, *held))

    def disarm(self):
        """Holds no batch any more."""
        self._next_call.disarm()
        self._held = None


def _array(variable):
    return ops.convert_to_numpy(variable.value)
