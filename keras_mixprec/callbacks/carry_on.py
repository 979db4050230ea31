"""Going on without a part of the monitor that does not work here."""

import re
import traceback
import warnings

# Characters of a warning's reason, and of the details in the log.
_SHORT, _LONG = 200, 8000

# What colours a terminal; TensorFlow and Keras put it into their errors.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.")


def carry_on_without(what: str, reason) -> None:
    """Warns, in one line, that `what` is not possible; training goes on.

    Args:
        what: String, a verb and its object.
        reason: Exception or string.
    """
    warnings.warn(
        f"MixPrecMonitor cannot {what}, and carries on without: "
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
