"""A log that also sends its content to loggers."""

from collections.abc import Callable, Sequence
from typing import Any

from keras_mixprec.loggers.logger import METHODS
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.schema import (
    NORMS_BY_VARIABLE,
    OVERFLOWS_BY_VARIABLE,
)

# Curves of single variables are too many for loggers that draw every curve.
_LEFT_OUT = (f"{NORMS_BY_VARIABLE}/", f"{OVERFLOWS_BY_VARIABLE}/")


def check_loggers(loggers: Any) -> list:
    """Checks loggers and returns them as a list.

    Args:
        loggers: List or tuple.

    Raises:
        TypeError: If `loggers` is not a list or tuple, or if an element is not
            a logger.
    """
    if not isinstance(loggers, (list, tuple)):
        raise TypeError(
            "`loggers` must be a list of loggers. "
            f"Received: loggers={loggers!r} of type {type(loggers).__name__}"
        )
    for logger in loggers:
        missing = [n for n in METHODS if not callable(getattr(logger, n, None))]
        if missing or isinstance(logger, type):
            lacks = f" without {', '.join(missing)}" if missing else ""
            raise TypeError(
                "Each of `loggers` must have the methods of "
                "`keras_mixprec.loggers.Logger`: begin, scalars, event and "
                f"finish. Received: {logger!r}{lacks}"
            )
    return list(loggers)


class ForwardedLog(RunLog):
    """A `RunLog` that also sends curves and events to loggers.

    Args:
        log_dir: As for `RunLog`.
        loggers: List of `Logger`.
        warn: Function that takes a text and an error, and warns that a logger
            failed.
    """

    def __init__(self, log_dir: Any, loggers: Sequence, warn: Callable):
        self._loggers = list(loggers)
        self._warn = warn
        super().__init__(log_dir)

    def scalars(self, step, values):
        """As in `RunLog`."""
        super().scalars(step, values)
        kept = [t for t in values if not t.startswith(_LEFT_OUT)]
        if self._loggers and kept:
            passed = {tag: float(values[tag]) for tag in kept}
            self._pass_on("scalars", step, passed)

    def event(self, step, event):
        """As in `RunLog`."""
        super().event(step, event)
        self._pass_on("event", step, dict(event))

    def settings(self, values, names, metrics):
        """As in `RunLog`."""
        super().settings(values, names, metrics)
        self._pass_on("begin", dict(values))

    def finish(self, summary: Any, load_report: Any) -> None:
        """Sends the results to the loggers.

        Args:
            summary: The `TrainingSummary`.
            load_report: Function that returns the `MixPrecReport`.
        """
        if not (self._loggers and self._events.ours):
            return
        try:
            report = load_report()
        # Training must not fail because another run in the folder is damaged or
        # was written by a newer version.
        except Exception as error:
            self._loggers.clear()
            self._warn("pass the report to the loggers", error)
            return
        self._pass_on("finish", summary, report)

    def _pass_on(self, method, *arguments):
        if not self._events.ours:
            return
        for logger in list(self._loggers):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:
                self._loggers.remove(logger)
                name = type(logger).__name__
                self._warn(f"log to {name} (`{method}`)", error)
