"""What a callback asks of the engine."""

import dataclasses
from collections.abc import Callable

from keras_mixprec.reporting import NoLog


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an engine looks; the arguments of `MixPrecMonitor`.

    Attributes:
        open_log: Function that returns a `RunLog`. Defaults to one that keeps
            nothing.
        summary: Boolean. Whether the `TrainingSummary` is printed at the end.
    """

    open_log: Callable = NoLog
    update_freq: int = 50
    probe_every: int = 0
    max_overhead: float = 0.02
    keep_failing_batches: int = 0
    stop_after: int | None = None
    on_stop: str = "stop"
    verbose: int = 1
    summary: bool = False
