"""Numbering the steps of a training loop."""


class StepCount:
    """The number of the step that is next, over epochs and `fit`s.

    A loop written by hand may number its batches on, or begin again with each
    epoch and not tell of it.

    Args:
        first: Int. The number of the first step.
        steps_per_call: Int. Steps that one call takes at most.

    Attributes:
        step: Int.
    """

    def __init__(self, first: int, steps_per_call: int):
        self.step = self._first = self._epoch_start = first
        self._steps_per_call = steps_per_call
        self._batch: int | None = None
        self._is_new = True

    def begin_epoch(self):
        """Counts from the end of what came before."""
        if self._batch is not None:
            self.step += 1
        self._epoch_start, self._batch = self.step, None

    def begin_batch(self, batch: int):
        """The next step is the `batch`th of the epoch."""
        if self._batch is not None and batch <= self._batch:
            self.begin_epoch()
        if self._is_new:
            # Those before built the model, unwatched.
            self._first, self._is_new = self._first + batch, False
        self._batch = batch
        self.step = self._epoch_start + batch

    def cancel_batch(self):
        """The batch that has begun is not trained on after all."""
        self._batch = None

    def end_epoch(self, steps: int | None, attempted: int | None):
        """The last batch of the epoch is over.

        Args:
            steps: Int. Steps of an epoch, `None` if that is not known.
            attempted: Int. Steps attempted since the first, `None` if that is
                not known.
        """
        self._batch = None
        # The last call of several steps may have been cut short.
        last = self.step + self._steps_per_call
        if steps:
            self.step = min(last, self._epoch_start + steps)
        elif attempted is None:
            self.step = last
        else:
            # An epoch of unknown length may end with a call of no step.
            self.step = max(self.step, min(last, self._first + attempted))
