"""A model's train function: numbered steps, the next batch."""

import functools
import weakref
from collections.abc import Callable

import keras

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.policies.layers import STAND_IN


class StepCount:
    """The number of the step that is next, over epochs and `fit`s.

    A loop written by hand may go on counting batches over epochs, or start
    again in each epoch without saying so.

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
            # Earlier batches built the model, unwatched.
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
            # An epoch of unknown length may end with a call that takes no step.
            self.step = max(self.step, min(last, self._first + attempted))


# The attribute of a model that holds the owner of its train function. The owner
# refers to the model, so it would keep the model alive elsewhere.
_ATTRIBUTE = "_keras_mixprec_train_function"


class TrainFunction:
    """The train function of a model, and what waits for its next call.

    It alone sets `model.train_function` during a `fit`. A guarded function is
    compiled with other methods in place, and kept for the next `fit`.

    Args:
        model: A compiled `keras.Model`.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._on_error: Callable | None = None
        self._guarded: Callable | None = None
        self._unguarded: Callable = lambda: None
        # While work waits for a batch: the function that `fit` calls instead,
        # the one that it replaced, and the work.
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
        """Leaves the model with a train function of its own."""
        self._remove_tap()
        self.explain_errors(None)
        if not self.fits:
            self._guarded = None
        elif self.is_guarded:
            self._model.make_train_function(force=True)
            self._unguarded = weakref.ref(self._model.train_function)

    def explain_errors(self, on_error: Callable | None):
        """Calls a function after a step that raises.

        On torch it is called after every guarded step, because a loss may
        refuse NaN. Compiled steps refuse no values; if the compiler refuses a
        step, it does so in a call that something waits for.

        Args:
            on_error: Function of an exception and a batch as `train_step` takes
                it, which returns whether to take the step again; `None` for
                none.
        """
        self._on_error = on_error

    # Work that waits for the next call.

    def before_next(self, work: Callable):
        """Calls `work(batch)` before the model trains on its next batch.

        The work may rebuild the train function. The batch is `None` if only
        other processes have one. Works are called in the order they were added.
        """
        self._put_tap()
        self._before.append(work)

    def waits(self, work: Callable | None) -> bool:
        """Returns whether a call of `before_next` still waits.

        Rebuilding the train function drops it.
        """
        return self._is_tapped and work in self._before

    def cancel(self):
        """Drops the calls that `before_next` was given."""
        self._remove_tap()

    @property
    def own(self) -> Callable | None:
        """The train function below all that waits."""
        return self._below if self._is_tapped else self._model.train_function

    @property
    def _is_tapped(self):
        return self._tap is not None and self._model.train_function is self._tap

    def _put_tap(self):
        if not self._is_tapped:
            self._remove_tap()
            self._below = self._model.train_function
            # A new object each time, which identifies the call.
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
            # The tap stays until a batch arrives, because an epoch of unknown
            # length ends with a call that has no batch.
            works, taken = self._remove_tap(), batch
            for work in works:
                work(batch)

        def train(*args):
            # The work may have replaced the train function.
            return self._model.train_function(*args)

        def raised(error):
            known = self._on_error is not None and taken is not None
            return known and self._on_error(error, taken)

        tapped = active.batches().tapped(self._model, train, visit, raised)
        return tapped(*args)

    # Guarded steps.

    @property
    def fits(self) -> bool:
        """Returns whether the model still has its compiled train function.

        `compile` gives it another one, for example.
        """
        own = self.own
        return own is not None and own in (self._unguarded(), self._guarded)

    @property
    def is_guarded(self) -> bool:
        """Returns whether the model trains with a guarded function."""
        guarded = self._guarded
        if guarded is None or self._model.train_function is guarded:
            return guarded is not None
        return self.own is guarded

    def guard(self, in_steps: Replacements, wrapped: Callable):
        """Lets the model train with a guarded one, compiled if need be.

        Args:
            in_steps: The `Replacements` that are in place during its steps.
            wrapped: Function from the model's `train_step` to its replacement,
                which puts them in place. A compiled step does so once, not in
                each call, which would take 1% of a step of 40 small layers.
        """
        if self.is_guarded:
            return
        if self.fits:
            self._model.train_function = self._guarded
            return
        model = self._model
        # A new function each time: JAX would reuse the trace of a function that
        # it knows, with an earlier loss, metric or optimizer.
        original = model.train_step
        step = wrapped(original)
        setattr(step, STAND_IN, original)
        in_steps.add(model, "train_step", step)
        with in_steps:
            model.make_train_function(force=True)
        self._guarded = model.train_function
        if keras.backend.backend() == "torch":
            # On torch, a train function looks `train_step` up in each call.
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
            # `on_error` may have replaced it.
            return self.own(data)

        return guarded
