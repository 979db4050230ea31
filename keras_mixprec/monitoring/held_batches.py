"""Holds each batch until its step is over, to catch one that fails."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_mixprec.monitoring.failures import warn_disabled
from keras_mixprec.numerics.calls import seed_states


class HeldBatch(NamedTuple):
    """A batch, and the state needed to repeat its step.

    Attributes:
        batch: As `train_step` takes it, or `None` if only other workers have a
            batch.
        step: Int. The number of the batch's step, counted from 1.
        seeds: List of arrays, the values of the random seeds.
        scales: Dict of loss scales, by optimizer name.
    """

    batch: Any
    step: int
    seeds: list
    scales: dict


class _Wait(NamedTuple):
    purpose: str
    then: Callable
    has_failed: Callable
    last_step: float


class HeldBatches:
    """Calls waiting functions with the batches whose steps have failed.

    The random state is copied, but the batches are not.

    Args:
        watch: The `Watch`.
    """

    def __init__(self, watch):
        self._watch = watch
        self._waits: list[_Wait] = []
        self._held: HeldBatch | None = None

    @property
    def due_at(self) -> float:
        """The step from which batches are held, infinity for never."""
        return 0 if self._waits else math.inf

    def wait(
        self,
        purpose: str,
        then: Callable,
        has_failed: Callable | None = None,
        steps: float = math.inf,
    ) -> bool:
        """Waits for a batch whose step fails.

        Args:
            purpose: As for `Watch.attempt`.
            then: Function of the `HeldBatch`, or of `None` if no step has
                failed in time. It returns whether to wait for another batch.
            has_failed: Function that returns whether the last step has failed.
                By default, a step fails if an optimizer skips it.
            steps: The number of steps to wait. Defaults to infinity.

        Returns:
            True if waiting is possible. `False` if one call to the train
            function takes several steps, because any of them may have failed.
        """
        watch = self._watch
        if getattr(watch.model, "steps_per_execution", 1) > 1:
            return False
        if not self._waits:
            watch.on_next_batch(self._hold)
        has_failed = has_failed or self._was_skipped
        last_step = watch.step + steps
        self._waits.append(_Wait(purpose, then, has_failed, last_step))
        return True

    def stop(self, then: Callable):
        """Ends the wait of a function."""
        self._waits = [wait for wait in self._waits if wait.then != then]

    def check(self):
        """Passes on the last batch if its step failed; holds the next batch."""
        watch = self._watch
        held, self._held = self._held, None
        if held:
            watch.synchronized_model()
            waits, self._waits = self._waits, []
            going_on = [wait for wait in waits if self._goes_on(wait, held)]
            self._waits = going_on + self._waits
        if self._waits:
            watch.on_next_batch(self._hold)

    def _goes_on(self, wait, held):
        if wait.has_failed():
            return self._watch.attempt(wait.purpose, wait.then, held)
        if self._watch.step >= wait.last_step:
            return self._watch.attempt(wait.purpose, wait.then, None)
        return True

    def _was_skipped(self):
        optimizers = self._watch.counters.optimizers().values()
        return any(optimizer.last_step_skipped for optimizer in optimizers)

    def _hold(self, batch):
        watch = self._watch
        optimizers = watch.counters.optimizers()
        seeds = [
            np.array(ops.convert_to_numpy(v.value))
            for v in seed_states(watch.model)
        ]
        scales = {n: float(o.loss_scale) for n, o in optimizers.items()}
        self._held = HeldBatch(batch, watch.step + 1, seeds, scales)


def keep_failing(watch):
    """Keeps the first `keep_failing_batches` batches of skipped steps.

    Args:
        watch: The `Watch`.
    """
    left = watch.settings.keep_failing_batches

    def keep(held):
        # Import the diagnosis lazily, because most runs do not need the
        # diagnosis.
        from keras_mixprec.diagnosis.failing_batch import FailingBatch

        kept = watch.failing_batches
        if held.batch is not None:
            kept.append(FailingBatch.of(watch.model, *held))
        return len(kept) < left

    if left and not watch.held.wait("keep failing batches", keep):
        reason = "`steps_per_execution` must be 1"
        warn_disabled("keep failing batches", reason)
