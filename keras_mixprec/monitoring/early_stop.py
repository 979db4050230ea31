"""When to end a run that cannot recover, and how."""

from keras.src.utils import io_utils


def reason_to_stop(reading, verdicts, stop_after: int | None) -> str | None:
    """Returns the reason to stop early, or `None`.

    Args:
        reading: `Reading` of an optimizer.
        verdicts: List of the `Verdict`s of the run.
        stop_after: Int. Skipped steps in a row to wait for, `None` for ever.
    """
    if stop_after is None or reading.in_a_row < stop_after:
        return None
    skipped = f"{reading.in_a_row} steps in a row were skipped"
    if any(verdict.kind == "weights_lost" for verdict in verdicts):
        return f"{skipped} and the weights are not finite"
    if reading.collapsed:
        scale = f"{reading.loss_scale:g}"
        return f"{skipped} and a loss scale of {scale} does not help either"
    return skipped


class EarlyStop:
    """Ends a `fit`, once, in the way that was asked for.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
        settings: `Settings`.
    """

    def __init__(self, model, log, settings):
        self._model = model
        self._log = log
        self._settings = settings
        self._stopped = False
        self._failure = None

    @property
    def failed(self) -> bool:
        """Whether an exception is to end `fit`."""
        return self._failure is not None

    def stop(self, step: int, reason: str):
        """Stops training, or lets it end with an exception.

        Args:
            step: Int. The number of the next batch.
            reason: String.
        """
        if self._stopped:
            return
        self._stopped = True
        self._log.event(step, {"kind": "stopped", "reason": reason})
        if self._settings.on_stop == "raise":
            where = self._log.folder or "the log of the first worker"
            self.fail(
                f"MixPrecMonitor stops at step {step}: {reason}. See "
                f"{where} for what is wrong, or pass `on_stop='stop'`."
            )
            return
        self._model.stop_training = True
        if self._settings.verbose:
            io_utils.print_msg(f"\nMixPrecMonitor stops here: {reason}.")

    def fail(self, reason: str):
        """Lets `fit` end with an exception as soon as it can.

        Args:
            reason: String. Its message.
        """
        self._failure = reason

    def raise_if_failed(self, callbacks):
        """Raises what was asked for, with our own callbacks at their end.

        Others do not come to theirs, where `BackupAndRestore` deletes its
        backup.

        Args:
            callbacks: List of our callbacks of this `fit`.
        """
        if not self.failed:
            return
        reason, self._failure = self._failure, None
        for callback in [*callbacks]:
            callback.on_train_end()
        raise FloatingPointError(reason)
