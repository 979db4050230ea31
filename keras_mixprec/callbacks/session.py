"""The callbacks of one `fit`, which share one `Watch`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_mixprec._fit_end import SESSION_ATTRIBUTE
from keras_mixprec.backend.common import any_worker
from keras_mixprec.callbacks.watch import Watch
from keras_mixprec.monitoring.attach import guard_of
from keras_mixprec.monitoring.failures import note_end
from keras_mixprec.monitoring.speed import READINGS
from keras_mixprec.reporting.run_log import NoLog


class Settings:
    """The options of a session without a `MixPrecMonitor`.

    Args:
        verbose: `0` or `1`.
    """

    log_dir = stop_after = None
    update_freq, probe_every, max_overhead = 50, 0, 0.02
    keep_failing_batches = 0
    on_stop = "stop"

    def __init__(self, verbose: int = 1):
        self.verbose = verbose


class Session:
    """The callbacks of one `fit`, which share readings and diagnoses.

    The first callback of the session forwards the hooks of `fit`.

    Attributes:
        model: The `keras.Model`, with variables that may be out of date on
            JAX.
        settings: The `MixPrecMonitor`, or the `Settings` of the tuner if there
            is no monitor.
        before_training: Sequence of dicts, the events to log as training
            starts.
        log: The `RunLog`.
        verdicts: List of the `Verdict`s of this `fit`, one for each fault.
        failing_batches: List of the `FailingBatch`es of this `fit`.
        make_tuning: Function from the `Watch` to the `Tuning`, `None` without a
            tuner.
        watch: The `Watch`, `None` before the model is built.
    """

    def __init__(self, model, params):
        self.model = model
        self.settings: Any = Settings()
        self.log: Any = NoLog()
        self.before_training: Sequence = ()
        self.verdicts: list = []
        self.failing_batches: list = []
        self.make_tuning: Callable | None = None
        self.watch: Any = None
        self._members: list = []
        # Keras passes the same `params` dict to all callbacks of one `fit`, so
        # the dict identifies the `fit`.
        self._params = params
        self._has_waited = self._has_finished = False

    @classmethod
    def join(
        cls,
        callback,
        settings: Any,
        open_log: Callable | None = None,
        before_training: Sequence = (),
    ) -> "Session":
        """Returns the session of a callback's model.

        Args:
            callback: A `CopiedCallback`, in its `on_train_begin`.
            settings: `Settings`, or a `MixPrecMonitor`.
            open_log: Function that returns the `RunLog` of a monitor, or `None`
                for a tuner. A monitor's settings override a tuner's. Defaults
                to `None`.
            before_training: As for the attribute.
        """
        model, params = callback.model, callback.params
        session = vars(model).get(SESSION_ATTRIBUTE)
        is_own = session is not None and session._params is params
        if is_own and callback in session._members:
            raise ValueError(
                "`callbacks` must not have the same callback twice. Received: "
                f"a second {type(callback).__name__}: {callback!r}"
            )
        # If a session is still open, an exception ended an earlier `fit`.
        if not is_own or session.watch:
            if session:
                session.log.close()
            guard_of(model).stop()
            session = vars(model)[SESSION_ATTRIBUTE] = cls(model, params)
        session._add(callback, settings, open_log, before_training)
        return session

    def _add(self, callback, settings, open_log, before_training):
        if open_log and self.has_monitor:
            raise ValueError(
                "A `fit` can have only one `MixPrecMonitor`. Received: two, "
                f"with log_dir={self.settings.log_dir!r} and "
                f"log_dir={settings.log_dir!r}"
            )
        if open_log:
            self.settings, self.log = settings, open_log()
            self.before_training = before_training
        elif not self._members:
            self.settings = settings
        self._members.append(callback)

    @property
    def has_monitor(self) -> bool:
        """Returns whether one of the callbacks is a `MixPrecMonitor`."""
        return self.settings.log_dir is not None

    def add_tuner(self, make_tuning: Callable):
        """Lets a tuner repair the model.

        Args:
            make_tuning: Function that takes the `Watch` and returns a `Tuning`.
        """
        if self.make_tuning:
            raise ValueError(
                "A `fit` can have only one `PrecisionTuner`. Received: two in "
                "`callbacks`"
            )
        self.make_tuning = make_tuning

    def leave(self, callback):
        """Removes a callback; the last callback closes the log."""
        self._members.remove(callback)
        if not self._members:
            guard_of(self.model).stop()
            self.log.close()
            if self.watch.several_workers:
                # Wait until the first worker has closed the log, because the
                # reports of the other workers read the log.
                any_worker(self.model, [True])
            if vars(self.model).get(SESSION_ATTRIBUTE) is self:
                del vars(self.model)[SESSION_ATTRIBUTE]

    def abandon(self, error: BaseException):
        """Restores the model after an exception has ended `fit`."""
        model = self.model
        with contextlib.ExitStack() as stack:
            stack.callback(vars(model).pop, SESSION_ATTRIBUTE, None)
            stack.callback(self.log.close)
            stack.callback(guard_of(model).stop)
            for callback in self._members:
                stack.callback(callback.abandoned)
            watch = self.watch
            with contextlib.suppress(Exception):
                note_end(self.log, watch.step if watch else 0, error)
                if watch:
                    watch.counter_log.read(watch.step)

    def synchronized_model(self):
        """Returns the model, with the variables of the last step."""
        # On JAX, Keras updates the model's variables whenever `callback.model`
        # is read.
        return self._members[0].model

    def begin_epoch(self, callback, epoch: int):
        """Starts the watch if necessary, and begins an epoch."""
        if callback is self._members[0] and self._try_to_start():
            self.watch.begin_epoch(epoch)

    def begin_batch(self, callback, batch: int):
        """Runs the tasks that are due."""
        if callback is not self._members[0]:
            return
        if not self.watch and not self._try_to_start():
            self._has_waited = True
            return
        # From the second batch on, Keras may show a progress bar, and a printed
        # message must not break the bar.
        verbose = self._params and self._params.get("verbose")
        self.watch.begin_batch(batch, batch > 0 and verbose in (1, "auto"))
        if self.watch.failure:
            self.raise_if_failed()

    def _try_to_start(self):
        """Starts the watch, unless the first batch has to build the model."""
        model = self.model
        # `fit` has created the train function by now. Only in a custom training
        # loop may the model still be unbuilt.
        if model.built or model.train_function is not None or self._has_waited:
            self._start()
        return self.watch is not None

    def _start(self):
        if self.watch is None:
            self.watch = Watch(self)
            self.watch.start()

    def begin_validation(self, callback):
        """Pauses the clock during a validation."""
        if self.watch and self._members[:1] == [callback]:
            self.watch.begin_validation(self._steps is not None)

    def end_validation(self):
        """Ends the pause of a validation."""
        if self.watch:
            self.watch.budget.go_on()

    def end_epoch(self, callback, logs: dict | None):
        """Reads the counters and the logs at the end of an epoch."""
        if self.watch and callback is self._members[0]:
            self.watch.end_epoch(self._steps, logs)
            self.raise_if_failed()

    @property
    def _steps(self):
        """The number of steps of an epoch, `None` if it is not known."""
        return (self._params or {}).get("steps")

    def finish(self):
        """Reads the counters a last time."""
        if not self._has_finished:
            self._start()  # A `fit` without epochs has no watch yet.
            self._has_finished = True
            self.watch.finish()

    def raise_if_failed(self):
        """Ends `fit` with an exception if a callback has asked for one.

        Only the callbacks of this session end before the exception. If
        `fit` ended normally, `BackupAndRestore` would delete its backup.
        """
        if reason := self.watch.take_failure():
            for callback in [*self._members]:
                callback.on_train_end()
            raise FloatingPointError(reason)


class CopiedCallback(keras.callbacks.Callback):
    """A callback whose copies have its arguments and results, but no model."""

    _session: Any = None
    _OF_ONE_FIT = ("_model", "_session", "_repairs")

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Starts watching the model if necessary, and begins an epoch."""
        self._session.begin_epoch(self, epoch)

    # Do not add an `on_train_batch_end` hook: Keras would then fetch the logs
    # of every step from the device before the next step starts.
    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        """Runs the tasks that are due."""
        self._session.begin_batch(self, batch)

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Keeps the loss of the epoch, and pauses the clock of training."""
        if self._session:
            self._session.begin_validation(self)

    def on_test_end(self, logs: dict | None = None) -> None:
        """Continues the clock of training."""
        if self._session:
            self._session.end_validation()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Reads the counters at the end of the epoch."""
        self._session.end_epoch(self, logs)

    def abandoned(self) -> None:
        """Leaves the session after an exception has ended `fit`."""
        self._session = None

    def leave_out(self, seconds: float) -> None:
        """Does not count a pause as training time.

        The overhead budget is a share of the training time.
        """
        self._session.watch.budget.add(READINGS, seconds, is_overhead=False)

    def __getstate__(self):
        state = dict(vars(self))
        return state | {n: None for n in self._OF_ONE_FIT if n in state}
