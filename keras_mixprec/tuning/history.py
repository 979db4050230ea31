"""Reports the changes of a tuner in its history, log and console."""

from keras_mixprec._console import listed, print_message
from keras_mixprec.formats import format_moment
from keras_mixprec.policies.hardware import recommend_policy

# With several workers, only the worker that found the growth of the loss knows
# its numbers.
_ELSEWHERE = "loss of another worker's batch grew"

# The advice that is printed when the tuner gives up.
BY_HAND = (
    "Train with the policy 'mixed_bfloat16' or 'float32', or change the model "
    "as the verdicts advise"
)


_SCALE = {
    "raise": "below which gradients vanish",
    "lower": "above which gradients overflow",
    "advise": "",
}


class TunerHistory:
    """Reports each change, and writes the plan.

    Args:
        tuner: The `PrecisionTuner`, which has the history and the plan.
        watch: The `Watch`.
        repairs: `Repairs` of the model.

    Attributes:
        has_news: Boolean, whether this `fit` has an entry in the history.
    """

    def __init__(self, tuner, watch, repairs):
        self.has_news = False
        self._history = tuner.history
        self._tuner = tuner
        self._dry = {"dry_run": True} if tuner.dry_run else {}
        file = tuner.plan_file
        self._file = {"plan_file": file} if file else {}
        self._watch = watch
        self._repairs = repairs

    def report(self, kind: str, step: int, message: str, **fields):
        """Adds an entry to the history and the log, and prints its message.

        Args:
            kind: String. As in `PrecisionTuner.history`.
            step: Int.
            message: String.
            **fields: More fields of the entry.
        """
        event = {"kind": kind, **fields, "message": message}
        self._history.append({"step": step, **event})
        self.has_news = True
        self._watch.log.event(step, event)
        self._tuner.save_plan()
        if self._tuner.verbose:
            print_message(f"PrecisionTuner, {format_moment(step)}: {message}.")

    def change(self, kind: str, step: int, changes: dict, why: dict, **fields):
        """Reports new policies of layers, or proposed policies in a dry run.

        Args:
            kind: As for `report`.
            step: As for `report`.
            changes: Dict from path to the policy names before and after.
            why: Dict from path to `Demotion`.
            **fields: As for `report`.
        """
        verb = "demote" if kind == "demote" else "return"
        verb = f"would {verb}" if self._dry else f"{verb}s"
        message = f"{verb} {listed(changes)} to {_after(changes)}"
        if why:
            reasons = dict.fromkeys(d.kind for d in why.values())
            message += f" because of {', '.join(reasons)}"
        # The verdicts advise float32, so the message explains the choice of
        # bfloat16.
        if kind == "demote" and "mixed_bfloat16" in _after(changes):
            why_here = "`bfloat16=True`"
            if self._tuner.bfloat16 == "auto":
                why_here = recommend_policy().reason
            message += f"; bfloat16 has enough range, and {why_here}"
        self.report(
            kind,
            step,
            message,
            **self._layers(changes),
            reasons={path: d.reason for path, d in why.items()},
            because={path: d.because or d.reason for path, d in why.items()},
            **self._dry,
            **self._file,
            **fields,
        )

    def advised(self) -> set:
        """Returns the paths of layers whose demotion a dry run has reported."""
        told = [e for e in self._history if e["kind"] == "demote"]
        return {path for event in told for path in event["layers"]}

    def _layers(self, changes):
        pairs = changes.items()
        return {
            "layers": {p: {"before": b, "after": a} for p, (b, a) in pairs},
            "share_in_16_bits": self._repairs.share_in_16_bits(),
        }

    def scale(self, step: int, verb: str, before: float, after: float):
        """Reports a new loss scale, or advises a value once.

        Args:
            step: As for `report`.
            verb: String. `"raise"`, `"lower"`, or `"advise"` if only the user
                can change the scale.
            before: Float. log2 of the old scale.
            after: Float. log2 of the new scale.
        """
        kind, stays = f"{verb}_scale", self._dry or verb == "advise"
        if stays and any(event["kind"] == kind for event in self._history):
            return
        does = f"would {verb}" if self._dry else f"{verb}s"
        message = (
            f"{does} the loss scale from 2**{before:g} to 2**{after:g}, "
            f"{_SCALE[verb]}"
        )
        if verb == "advise":
            message = (
                "cannot change this model's loss scale. Gradients underflow or "
                f"overflow at 2**{before:g}: use a loss scale of "
                f"2**{after:g}, as the verdicts advise"
            )
        scales = {"before": 2.0**before, "after": 2.0**after}
        self.report(kind, step, message, **scales, **self._dry)

    def undo(self, step: int, changes: dict, growth, since: int):
        """Reports that a demotion is undone because training diverged.

        Args:
            step: As for `report`.
            changes: As for `change`.
            growth: String. A clause about the growth, or `None` if another
                worker found it.
            since: Int. The step whose weights and optimizer state return.
        """
        self.report(
            "undo",
            step,
            f"undoes the demotion of {listed(changes)} because the "
            f"{growth or _ELSEWHERE}. Weights and optimizer state return to "
            f"step {since}. Look for outliers in the data, or "
            "clip gradients",
            **self._layers(changes),
        )

    def returned(self, step: int, since: int, done: str | None):
        """Reports the return to a state from before training diverged.

        Args:
            step: As for `report`.
            since: Int. The step of this state.
            done: String. The settings with which training continues, or `None`
                if it stops.
        """
        then = f"continues with {done}" if done else "stops training there"
        message = f"returns to the state of step {since:,} and {then}"
        self.report("return", step, message, to=since, done=done)

    def spikes(self, step: int, count: int, times: float):
        """Reports steps that were skipped because of a gradient spike.

        Args:
            step: As for `report`.
            count: Int. The number of such steps since the last report.
            times: Float. The gradient norm of the last spike, as a multiple of
                the largest norm before the spike.
        """
        steps = "1 step" if count == 1 else f"{count:,} steps"
        message = (
            f"skips {steps} because gradients were {times:.3g} times as large "
            "as the largest before"
        )
        self.report("spikes", step, message, count=count, times=times)

    def rebuild(self):
        """Reports the seconds of the last rebuild and its first step."""
        seconds = self._repairs.take_rebuild_seconds()
        if seconds is not None:
            self._history[-1]["seconds"] = seconds
            event = {"kind": "rebuild", "seconds": round(seconds, 3)}
            self._watch.log.event(self._watch.step, event)


def _after(changes):
    return " and ".join(sorted({policy for _, policy in changes.values()}))


def start_message(
    disk, fits: bool, changes: dict, aside: dict, keeps_file: bool
) -> str:
    """Returns the message about the plan that a tuner starts from.

    Args:
        disk: `PlanOnDisk`.
        fits: Boolean, whether any entry of the plan is used.
        changes: Dict from path to the policies before and after.
        aside: Dict from path to the reason why the plan's entry is not used.
        keeps_file: Boolean, whether the file stays as it is.
    """
    sets = f", which sets {listed(changes)} to {_after(changes)}"
    starts = "starts from" if fits else "does not start from"
    starts = f"{starts} {disk.path}{sets if changes else ''}"
    if not aside:
        return starts
    whys = {}
    for path, why in aside.items():
        whys.setdefault(why, []).append(path)
    differ = "; ".join(f"{listed(p)} ({why})" for why, p in whys.items())
    file = (
        "The file stays as it is"
        if keeps_file
        else f"The file as it was is kept as {disk.earlier}"
    )
    return (
        f"{starts}. These layers keep the policy of your code, because the "
        f"plan was made for a different model: {differ}. {file}"
    )
