"""What monitoring costs and may cost, and going on without a part of it."""

import logging
import math
import re
import time
import traceback
import warnings
from collections import Counter

from keras_mixprec._checks import raise_if_strict
from keras_mixprec.numerics.dry_step import NotBuiltError

# Share of the training time that cannot be timed from here: guarding metrics
# and state in every step (0.3% to 1.1% on torch), the hooks' own microseconds,
# and steps that wait for each other when counters are read.
_UNTIMED = 0.0125

# Purposes. Readings of the counters and probes have half of the budget each, no
# more, or one of them would leave nothing to the other: a probe takes as long
# as a hundred readings. A diagnosis has to wait until enough is left of all.
READINGS, PROBES, DIAGNOSES = "readings", "probes", "diagnoses"


class OverheadBudget:
    """Counts the seconds that `fit` spends beside training.

    Args:
        max_overhead: Float. Share of the time of `fit`, from the second call
            of the train function on, that may be taken; of which 0.0125, but
            at most half, is for what is not timed. At 1 readings and probes
            have no limit.

    Attributes:
        counted: `collections.Counter`, seconds by purpose.
    """

    def __init__(self, max_overhead: float):
        self.counted = Counter()
        self._limited = max_overhead < 1
        self._share = max_overhead - min(max_overhead / 2, _UNTIMED)
        self._origin: float | None = None
        self._uncounted = 0.0
        self._first_step = 0

    def begin(self, step: int):
        """The first call, which compiles, is over; only now seconds count.

        Args:
            step: Int. The number of the next step.
        """
        if self._origin is None:
            self._origin = time.perf_counter()
            self._first_step = step

    @property
    def trained(self) -> float:
        """Seconds of training proper since then."""
        if self._origin is None:
            return 0.0
        elapsed = time.perf_counter() - self._origin
        return elapsed - self._uncounted - self.counted.total()

    def seconds_per_step(self, step: int) -> float:
        """Returns how long a plain step takes on average."""
        return self.trained / max(step - self._first_step, 1)

    def left(self, purpose: str) -> float:
        """Returns the seconds that a purpose may take now."""
        spent = self.counted.total()
        allowed = self._share * (self.trained + spent)
        if purpose == DIAGNOSES:
            return allowed - spent
        if allowed and not self._limited:
            return math.inf
        return allowed / 2 - self.counted[purpose]

    def add(self, purpose: str, seconds: float, counts: bool = True):
        """Takes note of what a purpose took.

        Args:
            purpose: String.
            seconds: Float.
            counts: Boolean. Whether it counts as overhead; what happens once,
                such as compilation, does not. Defaults to `True`.
        """
        if self._origin is None:
            return
        if counts:
            self.counted[purpose] += seconds  # type: ignore[assignment]
        else:
            self._uncounted += seconds


# Characters of a warning's reason, and of the details in the log.
_SHORT, _LONG = 200, 8000

# What colours a terminal; TensorFlow and Keras put it into their errors.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.")


# Silent unless somebody asks for it: the warning is one line.
_LOGGER = logging.getLogger("keras_mixprec")
_LOGGER.addHandler(logging.NullHandler())


def degrade(what: str, reason, who: str = "MixPrecMonitor") -> None:
    """Warns, in one line, that `what` is not possible; training continues.

    The logger `"keras_mixprec"` gets the traceback.

    Args:
        what: String, a verb and its object.
        reason: Exception or string.
        who: String. The callback that cannot. Defaults to `"MixPrecMonitor"`.
    """
    if not isinstance(reason, (NotBuiltError, NotImplementedError)):
        raise_if_strict(reason)
    error = reason if isinstance(reason, BaseException) else None
    _LOGGER.warning("%s cannot %s", who, what, exc_info=error)
    warnings.warn(
        f"{who} cannot {what}; that is disabled, training continues: "
        f"{one_line(reason)}",
        UserWarning,
        stacklevel=3,
    )


def failure(kind: str, reason, **fields) -> dict:
    """Returns the event for the log that something failed.

    Args:
        kind: String. What the event is called.
        reason: Exception or string.
        **fields: What else the event has.

    Returns:
        Dict with `reason`, one line, and the `details` behind it.
    """
    details = str(reason)
    if isinstance(reason, BaseException):
        details = "".join(traceback.format_exception(reason))
    details = _ANSI.sub("", details)[-_LONG:]
    return {
        "kind": kind,
        **fields,
        "reason": one_line(reason),
        "details": details,
    }


def one_line(reason) -> str:
    """Returns a reason without line breaks and colours, cut to fit a line.

    Args:
        reason: Exception or string.
    """
    text = " ".join(_ANSI.sub("", str(reason)).split())
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."
