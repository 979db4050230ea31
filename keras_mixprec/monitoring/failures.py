"""What is said of a part of monitoring that fails and is disabled."""

import logging
import traceback
import warnings

from keras_mixprec._checks import raise_if_strict
from keras_mixprec._console import one_line, without_colours
from keras_mixprec.numerics.dry_step import NotBuiltError

# Characters of the details in the log.
_LONG = 8000

# Silent unless somebody asks for it: the warning is one line.
_LOGGER = logging.getLogger("keras_mixprec")
_LOGGER.addHandler(logging.NullHandler())


def warn_disabled(what: str, reason, who: str = "MixPrecMonitor") -> None:
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


def failure_event(kind: str, reason, **fields) -> dict:
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
    details = without_colours(details)[-_LONG:]
    return {
        "kind": kind,
        **fields,
        "reason": one_line(reason),
        "details": details,
    }
