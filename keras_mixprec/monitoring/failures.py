"""Messages about failed tasks and about steps that raise an error."""

import contextlib
import logging
import traceback
import warnings

from keras_mixprec._checks import raise_if_strict
from keras_mixprec._console import one_line, without_colours
from keras_mixprec.backend.common import OutOfMemoryError, is_out_of_memory
from keras_mixprec.numerics.dry_step import NotBuiltError
from keras_mixprec.policies.layers import has_own_step
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.verdict_kinds import OF_TASK

# The maximum number of characters of a traceback in the log.
_LONG = 8000

# The warning about a failed task is one line. Users who want the traceback
# enable this logger.
_LOGGER = logging.getLogger("keras_mixprec")
_LOGGER.addHandler(logging.NullHandler())


def warn_disabled(what: str, reason, who: str = "MixPrecMonitor") -> None:
    """Warns in one line that a task failed and that training continues.

    The logger `"keras_mixprec"` gets the traceback.

    Args:
        what: String. A verb and its object, such as `"log layers"`.
        reason: Exception or string.
        who: String. The callback with the task. Defaults to
            `"MixPrecMonitor"`.
    """
    expected = NotBuiltError, NotImplementedError, OutOfMemoryError
    if not isinstance(reason, expected):
        raise_if_strict(reason)
    error = reason if isinstance(reason, BaseException) else None
    _LOGGER.warning("%s cannot %s", who, what, exc_info=error)
    warnings.warn(
        f"{who} cannot {what}, so training goes on without it: "
        f"{one_line(reason)}",
        UserWarning,
        stacklevel=3,
    )


def failure_event(kind: str, reason, **fields) -> dict:
    """Returns the log event of a failure.

    Args:
        kind: String. The kind of the event.
        reason: Exception or string.
        **fields: More fields of the event.

    Returns:
        Dict with the `reason` in one line, and the traceback as `details`.
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


def explain_error(watch, error: Exception, batch) -> bool:
    """Adds verdicts about a step to the exception that it raised.

    Args:
        watch: The `Watch`.
        error: The exception.
        batch: The batch of that step, as `train_step` takes it.

    Returns:
        True if the tuner repaired the fault, so the step can be repeated.
    """
    watch.counter_log.read(watch.step)
    examiner, verdicts, repaired = watch.examiner, [], False
    with contextlib.suppress(Exception):
        examiner.look_at_task(batch)
        verdicts += [v for v in watch.verdicts if v.kind in OF_TASK]
    # If the step also fails in float32, the diagnosis raises an error.
    # Precision is not the cause then.
    with contextlib.suppress(Exception):
        if not is_out_of_memory(error):
            repaired = _repaired(watch, batch, verdicts)
    event = failure_event("step_raised", error, at_step=watch.step + 1)
    watch.log.event(watch.step, event | {"repaired": repaired})
    for verdict in verdicts:
        error.add_note(f"keras_mixprec, on the batch of this step: {verdict}")
    return repaired


def note_end(log, step: int, error: BaseException):
    """Logs the exception that has ended `fit`, unless it is logged already.

    Args:
        log: The `RunLog`.
        step: Int. The number of steps taken.
        error: `BaseException`. A `KeyboardInterrupt`, for example, is logged as
            an interruption.
    """
    known = [
        event
        for event in log.story
        if event["kind"] in ("step_raised", "stopped")
        and not event.get("repaired")
    ]
    if not known:
        event = failure_event("fit_raised", error, at_step=step + 1)
        interrupted = not isinstance(error, Exception)
        event |= {"interrupted": True} if interrupted else {}
        log.event(step, event)


def _repaired(watch, batch, verdicts):
    """Diagnoses and repairs a step that raised an error.

    Adds to `verdicts`. Returns whether the step can be repeated.
    """
    model, step = watch.model, watch.step
    who = "MixPrecMonitor" * watch.settings.verbose
    found = watch.examiner.examine(batch, who, raised=True)
    verdicts += [finding.verdict for finding in found[0].findings]
    # A step cannot be repeated if other workers wait for its gradients, or if a
    # custom `train_step` may have updated weights before the error.
    alone = not (watch.several_workers or has_own_step(model))
    updated = watch.counters.attempted() != watch.taken
    if not watch.tuning or not alone or updated:
        return False
    before = PrecisionPlan.from_model(model)
    watch.repair(*found, step, raised=True)
    return PrecisionPlan.from_model(model) != before
