"""A model's train function: numbered steps, one call, the next batch."""

import functools
import weakref
from collections.abc import Callable

import keras

from keras_mixprec._patched import Replacements
from keras_mixprec.backend import active
from keras_mixprec.policies.layers import STAND_IN


class StepCount:
    """The number of the step that is next, over epochs and `fit`s.

    A loop written by hand may number its batches on, or begin again with each
    epoch and not notice it.

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


class DeferredCall:
    """Lets something else run instead of the next call of a train function.

    Several may wait for the same call; the one armed last goes first.
    """

    def __init__(self):
        self._armed = None

    @property
    def armed(self) -> bool:
        """Whether the call is still to come.

        It never will once the train function has been rebuilt.
        """
        if self._armed is None:
            return False
        model, tap = self._armed
        function = model.train_function
        while isinstance(function, _Tap) and function is not tap:
            function = function.below
        return function is tap

    def arm(self, model, train_function):
        """`train_function` is called next, and disarms before it trains.

        Instead of one that still waits: an epoch may end without the call.
        """
        self.disarm()
        tap = _Tap(train_function, model.train_function)
        self._armed = model, tap
        model.train_function = tap

    def disarm(self):
        """Puts the model's own function back, unless others still wait."""
        if self._armed is None:
            return
        (model, tap), self._armed = self._armed, None
        tap.waits = False
        while _is_over(model.train_function):
            model.train_function = model.train_function.below


def without_taps(function):
    """Returns the train function below all that stands in for it."""
    while isinstance(function, _Tap):
        function = function.below
    return function


class _Tap:
    """Stands in for a train function, the next call of which is `below`."""

    def __init__(self, train_function, below):
        self.below = below
        self.waits = True
        self._train_function = train_function

    def __call__(self, *args):
        return (self._train_function if self.waits else self.below)(*args)


def _is_over(function):
    return isinstance(function, _Tap) and not function.waits


class GuardedFunction:
    """The train function of a model, compiled with other methods in place.

    Args:
        model: A compiled `keras.Model`.
        in_steps: The `Replacements` that are in place during its steps.
        wrapped: Function from the model's `train_step` to what replaces it,
            which puts them in place: where it is compiled, once for all calls,
            as doing so in each takes 1% of a step of 40 small layers.

    Attributes:
        on_error: Function of the exception and the batch, called after a step
            that raises on torch, where a loss may refuse NaN, and returns
            whether to take the step again; `None` for none. Elsewhere steps
            are compiled, and refuse no values; what refuses to compile them
            does so on a batch that was `tapped`.
    """

    def __init__(self, model: keras.Model, in_steps: Replacements, wrapped):
        self._model = model
        self._in_steps = in_steps
        self._wrapped = wrapped
        self._guarded = None
        self._unguarded = lambda: None
        self.on_error: Callable | None = None
        self._refused = None

    @property
    def fits(self) -> bool:
        """Whether the model still has the train function that was compiled.

        It has another one after `compile`, say.
        """
        own = without_taps(self._model.train_function)
        return own is not None and own in (self._unguarded(), self._guarded)

    @property
    def in_place(self) -> bool:
        """Whether it is what the model trains with."""
        return without_taps(self._model.train_function) is self._guarded

    def put(self):
        """Makes it the model's train function, compiled again if need be."""
        if self.fits:
            self._model.train_function = self._guarded
        else:
            self._compile()

    def _compile(self):
        model, in_steps = self._model, self._in_steps
        # Another function each time: for one that it knows JAX takes the trace
        # that it knows, of another loss, metric or optimizer.
        original = model.train_step
        step = self._wrapped(original)
        on_torch = keras.backend.backend() == "torch"
        if on_torch:
            step = self._keeping_refused(step)
        setattr(step, STAND_IN, original)
        in_steps.add(model, "train_step", step)
        with in_steps.in_place():
            model.make_train_function(force=True)
        self._guarded = model.train_function
        if on_torch:
            # There a train function looks `train_step` up in each call.
            self._guarded = self._in_place_for(model.train_function)
        model.train_function = self._guarded

    def _in_place_for(self, train):
        @functools.wraps(train)
        def guarded(*args):
            self._refused = None
            try:
                with self._in_steps.in_place():
                    return train(*args)
            except Exception as error:
                batch, self._refused = self._refused, None
                if batch is None or not self.on_error:
                    raise
                if not self.on_error(error, batch):
                    raise
            # Another one by now, which what was armed above has called.
            return without_taps(self._model.train_function)(*args)

        return guarded

    def _keeping_refused(self, step):
        @functools.wraps(step)
        def keeping(batch):
            try:
                return step(batch)
            except Exception:
                self._refused = batch
                raise

        return keeping

    def remove(self):
        """Gives the model a train function of its own.

        This one is kept for the next `put`.
        """
        self.on_error = None
        if not self.fits:
            self._guarded = None
            return
        self._model.make_train_function(force=True)
        self._unguarded = weakref.ref(self._model.train_function)


class BatchCapture:
    """Holds the batch of one step until it is asked for. Nothing is copied."""

    def __init__(self):
        self._held = None
        self._deferred_call = DeferredCall()

    def hold(self, model, describe: Callable = lambda: None):
        """Holds the next batch that `model` trains on.

        Args:
            model: The `keras.Model`.
            describe: Function, called before the step is taken. Defaults to
                one that returns `None`.

        Raises:
            NotImplementedError: If batches cannot be held.
        """
        if getattr(model, "steps_per_execution", 1) > 1:
            raise NotImplementedError("several steps in one execution")

        def visit(batch):
            self._deferred_call.disarm()
            self._held = None if batch is None else (batch, describe())

        tapped = active.batches().tapped(
            model, lambda *args: model.train_function(*args), visit
        )
        self._deferred_call.arm(model, tapped)

    def take(self) -> tuple | None:
        """Returns the batch and what `describe` returned, once."""
        held, self._held = self._held, None
        return held

    def end_epoch(self):
        """Waits no more for a batch: there was none left to hold."""
        self._deferred_call.disarm()

    def disarm(self):
        """Holds no batch after all."""
        self._deferred_call.disarm()
        self._held = None
