"""What is said of what fails: a part of monitoring, or a step."""

import contextlib
import logging
import traceback
import warnings

from keras_mixprec._checks import raise_if_strict
from keras_mixprec._console import one_line, without_colours
from keras_mixprec.backend import active
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


def explain_error(session, error: Exception, batch) -> None:
    """Says with an exception what was wrong in the step that raised it.

    Args:
        session: The `Session`.
        error: What the step raised.
        batch: What it was given, as `train_step` takes it.
    """
    session.state.counter_log.read(session.step)
    event = failure_event("step_raised", error, at_step=session.step + 1)
    session.log.event(session.step, event)
    verdicts = session.examiner.verdicts
    known, who = len(verdicts), "MixPrecMonitor" * session.settings.verbose
    # What raises in float32 as well is no matter of precision.
    with contextlib.suppress(Exception):
        if not active.memory().is_exhausted(error):
            session.examiner.examine(session.model, batch, session.step, who)
    for verdict in verdicts[known:]:
        error.add_note(f"keras_mixprec, on the batch of this step: {verdict}")
