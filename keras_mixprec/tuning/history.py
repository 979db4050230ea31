"""What a tuner has done: its history, in the log and on the console."""

from keras_mixprec._console import listed, print_message

# What to do where the tuner gives up.
BY_HAND = (
    "Train with the policy 'mixed_bfloat16' or 'float32', or change the model "
    "as the verdicts advise"
)


class TunerHistory:
    """Reports each change once it is made.

    Args:
        settings: `TunerSettings`.
        session: The `Session`, for its log.
        repairs: `Repairs` of the model.

    Attributes:
        history: List of dicts, what was done.
    """

    def __init__(self, settings, session, repairs):
        self.history = []
        self._settings = settings
        self._session = session
        self._repairs = repairs
        self._done_before = []

    def at_first(self, kind: str, message: str):
        """Reports what was done before training, when that begins."""
        self._done_before.append((kind, message))

    def begin(self, step: int):
        """Training has begun, with this step."""
        for kind, message in self._done_before:
            self.report(kind, step, message)

    def report(self, kind: str, step: int, message: str, **fields):
        """Reports that something happened.

        Args:
            kind: String. As in `PrecisionTuner.history`.
            step: Int.
            message: String.
            **fields: What else the history has of it.
        """
        event = {"kind": kind, **fields, "message": message}
        self.history.append({"step": step, **event})
        self._session.log.event(step, event)
        if self._settings.verbose:
            print_message(f"PrecisionTuner at step {step}: {message}.")

    def change(self, kind: str, step: int, changes: dict, why: dict, **fields):
        """Reports that layers compute in something else now, or would.

        Args:
            kind: As for `report`.
            step: As for `report`.
            changes: Dict from path to the names of the policies before and
                after.
            why: Dict from path to `Demotion`.
            **fields: As for `report`.
        """
        after = sorted({policy for _, policy in changes.values()})
        would = "would change" if self._settings.dry_run else "changes"
        reasons = list(dict.fromkeys(d.kind for d in why.values()))
        rung = ""
        if kind == "demote" and "mixed_bfloat16" in after:
            # The advice of a verdict is float32, which always repairs.
            rung = f"; bfloat16 has the range: {self._settings.why_bfloat16}"
        self.report(
            kind,
            step,
            f"{would} {listed(changes)} to {' and '.join(after)}"
            + (f" because of {', '.join(reasons)}" if reasons else "")
            + rung,
            layers={
                path: {"before": before, "after": after}
                for path, (before, after) in changes.items()
            },
            reasons={path: d.reason for path, d in why.items()},
            share_in_16_bits=self._repairs.share_in_16_bits(),
            **({"dry_run": True} if self._settings.dry_run else {}),
            **fields,
        )

    def scale(self, step: int, before: float, after: float):
        """Reports that the loss scale is raised, or would be.

        Args:
            step: As for `report`.
            before: Float. The power of two that it was.
            after: Float. The power of two that it is now.
        """
        would = "would raise" if self._settings.dry_run else "raises"
        self.report(
            "raise_scale",
            step,
            f"{would} the loss scale from 2**{before:g} to 2**{after:g}, "
            "below which gradients vanish",
            before=2.0**before,
            after=2.0**after,
            **({"dry_run": True} if self._settings.dry_run else {}),
        )

    def undo(self, step: int, changes: dict, growth, since: int):
        """Reports a demotion that made training diverge and is undone.

        Args:
            step: As for `report`.
            changes: As for `change`.
            growth: `Growth` of what has diverged, `None` if it is what
                another worker compares.
            since: Int. The step whose weights and optimizer state are there
                again.
        """
        grown = "loss of another worker's batch grew"
        if growth:
            grown = (
                f"{growth.what} grew from {growth.before:.3g} to "
                f"{growth.now:.3g}"
            )
        self.report(
            "undo",
            step,
            f"undoes the demotion of {listed(changes)}: with it the "
            f"{grown}. Weights and optimizer state are those of step "
            f"{since} again. Look for outliers in the data, or clip gradients",
            layers={
                path: {"before": before, "after": after}
                for path, (before, after) in changes.items()
            },
            share_in_16_bits=self._repairs.share_in_16_bits(),
        )

    def rebuild(self, step: int):
        """Reports what the last rebuild cost, once its step is done."""
        seconds = self._repairs.rebuild_seconds()
        if seconds is not None:
            self.history[-1]["seconds"] = seconds
            event = {"kind": "rebuild", "seconds": round(seconds, 3)}
            self._session.log.event(step, event)
