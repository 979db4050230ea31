"""What a tuner has done: its history, in the log and on the console."""

from keras_mixprec._console import listed, print_message
from keras_mixprec.formats import format_moment

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
        history: List of dicts, to which what is done is added.

    Attributes:
        history: As given.
        has_news: Boolean. Whether anything was done in this `fit`.
    """

    def __init__(self, settings, session, repairs, history):
        self.history = history
        self.has_news = False
        self._settings = settings
        self._session = session
        self._repairs = repairs
        self._done_before = []

    def at_first(self, kind: str, message: str, **fields):
        """Reports what was done before training, when that begins."""
        self._done_before.append((kind, message, fields))

    def begin(self, step: int):
        """Training has begun, with this step."""
        for kind, message, fields in self._done_before:
            self.report(kind, step, message, **fields)

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
        self.has_news = True
        self._session.log.event(step, event)
        if self._settings.verbose:
            print_message(f"PrecisionTuner, {format_moment(step)}: {message}.")

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
        verb = "demote" if kind == "demote" else "return"
        would = f"would {verb}" if self._settings.dry_run else f"{verb}s"
        reasons = list(dict.fromkeys(d.kind for d in why.values()))
        rung = ""
        if kind == "demote" and "mixed_bfloat16" in after:
            # The advice of a verdict is float32, which always repairs.
            rung = (
                "; bfloat16 has enough range, and "
                f"{self._settings.why_bfloat16}"
            )
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
            because={path: d.because or d.reason for path, d in why.items()},
            share_in_16_bits=self._repairs.share_in_16_bits(),
            **({"dry_run": True} if self._settings.dry_run else {}),
            **({"plan_file": own} if (own := self._settings.plan) else {}),
            **fields,
        )

    def scale(self, step: int, before: float, after: float):
        """Reports that the loss scale is raised or lowered, or would be.

        Args:
            step: As for `report`.
            before: Float. The power of two that it was.
            after: Float. The power of two that it is now.
        """
        dry, verb = self._settings.dry_run, "raise"
        why = "below which gradients vanish"
        if after < before:
            verb, why = "lower", "above which gradients overflow"
        self._report_scale(
            f"{verb}_scale",
            step,
            f"{f'would {verb}' if dry else f'{verb}s'} the loss scale from "
            f"2**{before:g} to 2**{after:g}, {why}",
            before,
            after,
        )

    def advise_scale(self, step: int, before: float, after: float):
        """Reports which loss scale the user has to set.

        Args:
            step: As for `report`.
            before: As for `scale`.
            after: Float. The power of two that it has to be.
        """
        self._report_scale(
            "advise_scale",
            step,
            f"cannot change this model's loss scale of 2**{before:g}, at which "
            f"gradients vanish. They survive at 2**{after:g}: train with that, "
            "as the verdicts advise",
            before,
            after,
        )

    def _report_scale(self, kind, step, message, before, after):
        """Reports it; what leaves the scale as it is, once."""
        dry = {"dry_run": True} if self._settings.dry_run else {}
        stays = dry or kind == "advise_scale"
        if stays and any(event["kind"] == kind for event in self.history):
            return
        scales = {"before": 2.0**before, "after": 2.0**after}
        self.report(kind, step, message, **scales, **dry)

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


def said_at_start(disk, start, changes: dict, keeps_file: bool) -> str:
    """Returns what a tuner says of the plan that it starts from.

    Args:
        disk: `PlanOnDisk`.
        start: `PlanStart`, what fits of the plan.
        changes: Dict from path to the policies before and after.
        keeps_file: Boolean. Whether the file is not written to.
    """
    after = sorted({policy for _, policy in changes.values()})
    sets = f", which sets {listed(changes)} to {' and '.join(after)}"
    starts = f"starts from {disk.path}{sets if changes else ''}"
    if not start.aside:
        return starts
    whys = {}
    for path, why in start.aside.items():
        whys.setdefault(why, []).append(path)
    differ = "; ".join(f"{listed(p)} ({why})" for why, p in whys.items())
    file = (
        "The file stays as it is"
        if keeps_file
        else f"The file as it was is kept as {disk.earlier}"
    )
    return (
        f"{starts if start.used else f'does not start from {disk.path}'}. Your "
        f"code wins where the plan was made for another model: {differ}. {file}"
    )
