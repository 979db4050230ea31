"""Options of a session, and callbacks that can be copied."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_mixprec.monitoring.overhead import READINGS
from keras_mixprec.reporting.run_log import NoLog


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of a session, most of them arguments of `MixPrecMonitor`.

    Attributes:
        log_dir: String, the folder of the log. `None` for a tuner, whose
            settings give way to a monitor's.
        open_log: Function that returns a `RunLog`. Defaults to one that keeps
            nothing.
        summary: Boolean, whether the `TrainingSummary` is printed at the end.
        before_training: List of dicts, events logged as training starts.
    """

    log_dir: str | None = None
    open_log: Callable = NoLog
    update_freq: int = 50
    probe_every: int = 0
    max_overhead: float = 0.02
    keep_failing_batches: int = 0
    stop_after: int | None = None
    on_stop: str = "stop"
    verbose: int = 1
    summary: bool = False
    before_training: list = dataclasses.field(default_factory=list)

    @property
    def agree_every(self) -> int:
        """Steps after which several workers agree on what all must do."""
        return min(self.update_freq, self.stop_after or self.update_freq)

    def logged(self) -> dict:
        """Returns what the log has of them, to make another run alike."""
        return {
            "log_dir": str(self.log_dir),
            "update_freq": self.update_freq,
            "probe_every": self.probe_every,
            "max_overhead": self.max_overhead,
        }


class CopiedCallback(keras.callbacks.Callback):
    """A callback that is copied without the model and the `fit` it is in.

    Its arguments and the results of a `fit` are copied.
    """

    _session: Any = None
    _OF_ONE_FIT = ("_model", "_session", "_repairs")

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Begins to watch the model, or to count the batches of an epoch."""
        self._session.begin_epoch(self, epoch)

    # `on_train_batch_end` would make Keras fetch the logs of every step from
    # the device before it starts the next one.
    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        """Runs the tasks whose step has come."""
        self._session.begin_batch(self, batch)

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Keeps the loss of the epoch; a validation is no time of training."""
        if self._session:
            self._session.begin_validation(self)

    def on_test_end(self, logs: dict | None = None) -> None:
        """Training goes on."""
        if self._session:
            self._session.end_validation()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Reads the counters at the end of the epoch."""
        self._session.end_epoch(self, logs)

    def abandoned(self) -> None:
        """An exception has ended `fit`."""
        self._session = None

    def leave_out(self, seconds: float) -> None:
        """Takes note of a pause in `fit`, which is no time of training.

        The overhead budget is a share of the time of training.
        """
        self._session.watch.budget.add(READINGS, seconds, is_overhead=False)

    def __getstate__(self):
        state = dict(vars(self))
        return state | {n: None for n in self._OF_ONE_FIT if n in state}
