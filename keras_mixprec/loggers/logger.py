"""What a logger does."""

from collections.abc import Mapping
from typing import Any, Protocol


class Logger(Protocol):
    """Gets from `MixPrecMonitor` what it logs, step by step.

    All is called by the process that writes the log, in `fit`, in the time
    that `max_overhead` limits. If one raises, a warning reports it once, the
    logger gets no more in that `fit`, and training continues.

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
        """Training begins.

        Args:
            settings: Dict of what distinguishes runs: policy, optimizer, rule
                of the loss scale, precision of float32 products.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes a point of some curves, by the tags that TensorBoard has.

        Those that there is one of for each variable are left out.

        Args:
            step: Int. The number of the batch, rising from call to call for
                each tag.
            values: Dict tag -> float, infinities and NaNs included.
        """

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Takes something that happened, as a line of `events.jsonl` has it.

        Args:
            step: Int. The number of the batch.
            event: Dict with `"kind"`: `"verdict"`, `"demote"`, ...
        """

    def finish(self, summary: Any, report: Any) -> None:
        """Training has ended.

        Args:
            summary: The `TrainingSummary`; `str()` is the text that a run ends
                with.
            report: The `MixPrecReport` of all that is in `log_dir`, with
                `to_html()`.
        """


METHODS = ("begin", "scalars", "event", "finish")
