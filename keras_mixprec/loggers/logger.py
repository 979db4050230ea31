"""The interface of a logger."""

from collections.abc import Mapping
from typing import Any, Protocol


class Logger(Protocol):
    """Receives the log of `MixPrecMonitor` step by step.

    The process that writes the log calls the methods during `fit`, within
    `max_overhead`. If a method raises, the monitor warns once and does not call
    this logger again in that `fit`. Training continues.

    Example:
    >>> import tempfile
    >>> class LastScale:
    ...     def begin(self, settings):
    ...         self.policy = settings["policy"]
    ...     def scalars(self, step, values):
    ...         self.last = values.get("mixprec/loss_scale", self.last)
    ...     last = None
    ...     def event(self, step, event):
    ...         pass
    ...     def finish(self, summary, report):
    ...         self.text = str(summary)
    >>> logger = LastScale()
    >>> monitor = MixPrecMonitor(
    ...     tempfile.mkdtemp(), loggers=[logger], verbose=0
    ... )
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer("sgd"), loss="mse")
    >>> _ = model.fit(
    ...     np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[monitor]
    ... )
    >>> logger.policy, logger.last
    ('float32', 32768.0)
    """

    def begin(self, settings: Mapping[str, str | float]) -> None:
        """Called when training begins.

        Args:
            settings: Dict of the settings of the run: policy, optimizer, rule
                of the loss scale, precision of float32 products.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Called with points of curves, except curves of single variables.

        Args:
            step: Int. The number of the batch, which rises for each tag.
            values: Dict from TensorBoard's tags to floats, which may be
                infinite or NaN.
        """

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Called with an event, which has the fields in `events.jsonl`.

        Args:
            step: Int. The number of the batch.
            event: Dict with `"kind"`: `"verdict"`, `"demote"`, ...
        """

    def finish(self, summary: Any, report: Any) -> None:
        """Called when training has ended.

        Args:
            summary: The `TrainingSummary`. `str()` returns the closing text.
            report: The `MixPrecReport` on `log_dir`.
        """


METHODS = ("begin", "scalars", "event", "finish")
