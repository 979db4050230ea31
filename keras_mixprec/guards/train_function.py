"""Owns the train function of a model: counts steps, passes on batches."""

import functools
import weakref
from collections.abc import Callable

import keras

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.policies.layers import STAND_IN


class StepCount:
    """Counts steps over epochs and `fit`s.

    A custom loop may number its batches across epochs, or restart the numbers
    in each epoch without calling `on_epoch_begin`.

    Args:
        first: Int. The number of the first step.
        steps_per_call: Int. The maximum number of steps in one call.

    Attributes:
        step: Int. The number of the next step.
    """

    def __init__(self, first: int, steps_per_call: int):
        self.step = self._first = self._epoch_start = first
        self._steps_per_call = steps_per_call
        self._batch: int | None = None
        self._is_new = True

    def begin_epoch(self):
        """Begins an epoch at the current step."""
        if self._batch is not None:
            self.step += 1
        self._epoch_start, self._batch = self.step, None

    def begin_batch(self, batch: int):
        """Records that the next step trains on this batch of the epoch."""
        if self._batch is not None and batch <= self._batch:
            self.begin_epoch()
        if self._is_new:
            # If earlier batches of the epoch were trained before monitoring
            # started, the first counted step comes after these batches.
            self._first, self._is_new = self._first + batch, False
        self._batch = batch
        self.step = self._epoch_start + batch

    def cancel_batch(self):
        """Records that the current batch is not trained on."""
        self._batch = None

    def end_epoch(self, steps: int | None, attempted: int | None):
        """Sets the step after the last batch of an epoch.

        Args:
            steps: Int. Steps of an epoch, or `None` if it is not known.
            attempted: Int. Steps attempted since the first step, or `None` if
                it is not known.
        """
        self._batch = None
        # The last call of an epoch may have taken fewer than `steps_per_call`
        # steps.
        last = self.step + self._steps_per_call
        if steps:
            self.step = min(last, self._epoch_start + steps)
        elif attempted is None:
            self.step = last
        else:
            # In an epoch of unknown length, the last call to the train function
            # may take no step.
            self.step = max(self.step, min(last, self._first + attempted))


# The `TrainFunction` is stored on the model. Stored elsewhere, the object would
# keep the model alive, because it refers to the model.
_ATTRIBUTE = "_keras_mixprec_train_function"


class TrainFunction:
    """Owns the train function of a model and the work before its next call.

    Only this class sets `model.train_function` during a `fit`. The guarded
    train function is compiled with replaced methods, and is kept for the next
    `fit`.

    Args:
        model: A compiled `keras.Model`.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._on_error: Callable | None = None
        self._guarded: Callable | None = None
        self._unguarded: Callable = lambda: None
        # While work waits for a batch, `fit` calls `_tap` in place of the train
        # function. The tap runs the work, and then the train function, which is
        # stored in `_below`.
        self._tap: Callable | None = None
        self._below: Callable | None = None
        self._before: list = []

    @classmethod
    def of(cls, model: keras.Model) -> "TrainFunction":
        """Returns the owner of a model's train function."""
        if _ATTRIBUTE not in vars(model):
            vars(model)[_ATTRIBUTE] = cls(model)
        return vars(model)[_ATTRIBUTE]

    def release(self):
        """Gives the model a train function without any guard."""
        self._remove_tap()
        self.explain_errors(None)
        if not self.fits:
            self._guarded = None
        elif self.is_guarded:
            self._model.make_train_function(force=True)
            self._unguarded = weakref.ref(self._model.train_function)

    def explain_errors(self, on_error: Callable | None):
        """Sets the function to call after a step that raises an error.

        On torch, any guarded step may raise an error, because a loss function
        may reject NaN. On other backends, only compilation raises errors, in a
        call that has work waiting.

        Args:
            on_error: Function of the exception and the batch, as `train_step`
                takes it, which returns whether to repeat the step. `None` for
                no function.
        """
        self._on_error = on_error

    def before_next(self, work: Callable):
        """Calls `work(batch)` before the model trains on its next batch.

        The work may rebuild the train function. The batch is `None` if only
        other processes have one. Functions run in the order in which they were
        added.
        """
        self._put_tap()
        self._before.append(work)

    def waits(self, work: Callable | None) -> bool:
        """Returns whether `work` still waits for a batch.

        Rebuilding the train function drops waiting work.
        """
        return self._is_tapped and work in self._before

    def cancel(self):
        """Drops all waiting work."""
        self._remove_tap()

    @property
    def own(self) -> Callable | None:
        """The train function without waiting work."""
        return self._below if self._is_tapped else self._model.train_function

    @property
    def _is_tapped(self):
        return self._tap is not None and self._model.train_function is self._tap

    def _put_tap(self):
        if not self._is_tapped:
            self._remove_tap()
            self._below = self._model.train_function
            # Each tap must be a new object, because `_is_tapped` compares by
            # identity.
            self._tap = functools.partial(self._called)
            self._model.train_function = self._tap

    def _remove_tap(self):
        if self._is_tapped:
            self._model.train_function = self._below
        works, self._before = self._before, []
        self._tap = self._below = None
        return works

    def _called(self, *args):
        taken = None

        def visit(batch):
            nonlocal taken
            # The tap stays in place of the train function until a batch
            # arrives, because an epoch of unknown length ends with a call that
            # has no batch.
            works, taken = self._remove_tap(), batch
            for work in works:
                work(batch)

        def train(*args):
            # The waiting work may have replaced the train function, so read
            # `model.train_function` again.
            return self._model.train_function(*args)

        def raised(error):
            known = self._on_error is not None and taken is not None
            return known and self._on_error(error, taken)

        tapped = active.batches().tapped(self._model, train, visit, raised)
        return tapped(*args)

    @property
    def fits(self) -> bool:
        """Returns whether the model still has a train function known here.

        After a new `compile`, for example, the model has a different one.
        """
        own = self.own
        return own is not None and own in (self._unguarded(), self._guarded)

    @property
    def is_guarded(self) -> bool:
        """Returns whether the model trains with the guarded function."""
        guarded = self._guarded
        if guarded is None or self._model.train_function is guarded:
            return guarded is not None
        return self.own is guarded

    def guard(self, in_steps: Replacements, wrapped: Callable):
        """Makes the model train with the guarded function.

        Args:
            in_steps: The `Replacements` that are active during guarded steps.
            wrapped: Function that takes the model's `train_step` and returns a
                guarded one, which activates the replacements. A compiled step
                activates them only while it is traced.
        """
        if self.is_guarded:
            return
        if self.fits:
            self._model.train_function = self._guarded
            return
        model = self._model
        # Create a new train function for each guard. JAX would reuse the trace
        # of a known function, with the old loss, metrics or optimizer.
        original = model.train_step
        step = wrapped(original)
        setattr(step, STAND_IN, original)
        in_steps.add(model, "train_step", step)
        with in_steps:
            model.make_train_function(force=True)
        self._guarded = model.train_function
        if keras.backend.backend() == "torch":
            # On torch, the train function looks up `train_step` in each call,
            # so the replaced methods must be active in each call.
            self._guarded = self._in_place_for(model.train_function, in_steps)
        model.train_function = self._guarded

    def _in_place_for(self, train, in_steps):
        @functools.wraps(train)
        def guarded(data):
            try:
                with in_steps:
                    return train(data)
            except Exception as error:
                if not (self._on_error and self._on_error(error, data[0])):
                    raise
            # `on_error` may have replaced the train function, so look up the
            # function again.
            return self.own(data)

        return guarded
