"""One sentence on a run: the cause, what was done about it, what it cost.

The console makes it from what it has in memory, the report and the tab from
the log, all of them here, so that they say the same.
"""

from keras_mixprec.formats import (
    format_count,
    format_moment,
    format_power,
)
from keras_mixprec.reporting.bad_input import bad_data_clause
from keras_mixprec.reporting.facts import (
    LEVELS,
    SCALE_CHANGES,
    STORY,
    Facts,
    asks_for_scale,
    dtype_of,
    dtypes_now,
    has_diverged,
    is_repaired,
    level_of,
    low_scales,
    scale_set,
)
from keras_mixprec.reporting.run_counts import (
    STUCK,
    is_low,
    not_known,
    share_clause,
    steps_clause,
)
from keras_mixprec.verdict_kinds import KINDS, cause_in_words

# The states of a run, the gravest first.
STATES = (
    "failing",
    "severe",
    "warning",
    "not_measured",
    "not_compared",
    "repaired",
    "healthy",
)

# The state of a run of which nothing but skipped steps is known.
_UNKNOWN = "not_measured"

_UNSCALED = {
    "train_step": "`train_step` does not scale the loss: small gradients "
    "vanish in float16",
    "apply": "`train_step` never calls `optimizer.apply`, so that the loss "
    "scale does nothing",
}


def headline(facts: Facts, brief: bool = False) -> dict:
    """Returns what a run comes down to.

    Args:
        facts: `Facts`.
        brief: Boolean. Whether to leave out what was not looked at. Defaults to
            `False`.

    Returns:
        Dict with `"text"`, one sentence, and `"state"`: `"healthy"`,
        `"repaired"`, `"warning"` (there is something to do), `"severe"` (what
        was found harms training), `"failing"` (training does not get on),
        `"not_compared"` (nothing is known to be wrong, but nothing was compared
        with float32) or `"not_measured"` (nor was any range measured).

    Example:
    >>> from keras_mixprec.reporting.facts import Facts
    >>> from keras_mixprec.reporting.headline import headline
    >>> layer = {"path": "a", "compute_dtype": "float16"}
    >>> headline(Facts([], [layer], 9, {"": 0}, 0, measured=True))["text"]
    '9 steps, none skipped, no findings; 100% of FLOPs in 16 bits; not \
compared with float32 (call keras_mixprec.diagnose(model, x, y)).'
    """
    story = _Story(facts)
    state = story.state()
    clauses = [
        *(clause for _, clause in story.clauses()),
        steps_clause(facts, story.quiet, state != _UNKNOWN),
        *story.interruption(),
        *share_clause(facts.layers, story.demoted, story.why_wide),
    ]
    if not brief and story.quiet and is_low(facts.layers):
        clauses += not_known(facts)
    text = "; ".join(clauses)
    if not story.names_layer:
        text = text[:1].upper() + text[1:]
    return {"text": f"{text}.", "state": state}


def main_finding(facts: Facts) -> dict | None:
    """Returns what the sentence begins with, to be led to from there.

    Args:
        facts: `Facts`.

    Returns:
        Dict with `"event"`, the one of `facts.events` that it is, `"repaired"`,
        whether it is over, and `"level"`, one of `LEVELS`. `None` if nothing
        was found.
    """
    story = _Story(facts)
    named = (event for event, _ in story.clauses() if event)
    event = next(named, story.unnamed)
    if event is None:
        return None
    level = level_of(event)
    # Only a verdict may be normal: all else that the sentence begins with is to
    # be looked into.
    if event["kind"] != "verdict" and level != "bad":
        level = "warning"
    return {"event": event, "repaired": story.is_over(event), "level": level}


# What is told in its own words, a warning.
_ODD = ("zero_gradients", "metric_not_finite", "validation_not_finite")


# What a return to a good state ends.
_LOST = "divergence", "weights_lost"


class _Story:
    """What happened, each finding with whether it is over."""

    def __init__(self, facts):
        self._facts = facts
        self._low_scales = low_scales(facts.events)
        # What came of them: one that has grown back is no story.
        told = STORY - {"loss_scale_low", "loss_scale_recovered"}
        events = [e for e in facts.events if e["kind"] in told]
        ends = [e for e in events if e.get("interrupted")]
        self._interrupted = next(iter(ends), None)
        events = [e for e in events if not e.get("interrupted")]
        self._kinds = {event["kind"] for event in events}
        self._last = {event["kind"]: event for event in events}
        self._now = dtypes_now(events, facts.layers)
        verdicts = [e for e in events if e["kind"] == "verdict"]
        self._verdicts = {e["verdict"]: e for e in verdicts[::-1]}
        self._nonfinite_losses = sum(
            sum(event["counts"].values())
            for event in events
            if event["kind"] == "nonfinite_losses"
        )
        self._changes = [e for e in events if "layers" in e]
        self.demoted = {
            path: dtype_of(change["after"])
            for event in self._changes
            if event["kind"] == "demote" and not event.get("dry_run")
            for path, change in event["layers"].items()
            if dtype_of(change["after"]) == self._now.get(path)
        }
        causes = [v for v in verdicts if _is_cause(v["verdict"])]
        causes.sort(key=self._order)
        self._causes = causes
        # What is normal, such as a search for the loss scale.
        self.unnamed = next(iter(verdicts), None)
        self.names_layer = bool(causes and causes[0]["layer"])
        wide = self._last.get("no_16_bits", {})
        self.why_wide = wide.get("message", "")
        self._is_policy_lost = wide.get("lost", False)
        found = verdicts or self._kinds - {"verdict", "sign_off", "no_16_bits"}
        self.quiet = not (found or self._low_scales)

    def clauses(self):
        """What the sentence says of events, causes first, each with its event.

        `None` instead of one where it says what came of others.
        """
        yield from self._cause()
        yield from self._outcome()

    def is_over(self, event):
        """Whether nothing is left to be done about a finding."""
        return event["kind"] == "verdict" and self._is_over(event)

    def _order(self, verdict):
        kind = KINDS[verdict["verdict"]]
        return self._is_over(verdict), kind.behind, LEVELS.index(kind.level)

    def _cause(self):
        """The most important finding, and how many more there are."""
        if not self._causes:
            said = {"weights_lost", "scale_collapsed"} & self._verdicts.keys()
            if self._nonfinite_losses and not said:
                count = self._nonfinite_losses
                yield (
                    self._last["nonfinite_losses"],
                    f"the loss itself was not finite in {count:,} "
                    f"batch{'es' * (count > 1)}, which no loss scale changes",
                )
            if "no_loss_scaling" in self._kinds:
                event = self._last["no_loss_scaling"]
                yield (
                    event,
                    _UNSCALED.get(
                        event.get("by"),
                        "float16 without loss scaling: small gradients vanish",
                    ),
                )
            return
        first = self._causes[0]
        alike = [v for v in self._causes if self._is_like(v, first)]
        yield first, self._describe(first, alike)
        others = [v for v in self._causes if not self._is_like(v, first)]
        demoted = [v for v in others if v["layer"] in self.demoted]
        demoted = [v for v in demoted if self._is_over(v)]
        if demoted:
            yield None, self._describe(demoted[0], demoted)
        if (more := len(others) - len(demoted)) > 0:
            yield None, f"{more} more finding{'s' if more > 1 else ''}"

    def _outcome(self):
        """What came of it."""
        last = self._last
        lost = self._verdicts.get("weights_lost")
        if lost and not self._has_returned():
            yield lost, f"weights not finite{_at(lost)}"
        elif self._is_collapsed():
            event = self._verdicts["scale_collapsed"]
            yield event, "the loss scale reached its minimum"
        odd = [last[kind] for kind in _ODD if kind in last]
        yield from ((e, e["message"]) for e in self._low_scales + odd)
        if event := last.get("return"):
            then = (
                f"went on with {event['done']}" if event["done"] else "stopped"
            )
            at = f"returned to the state of step {event['to']:,}{_at(event)}"
            yield event, f"the tuner {at} and {then}"
        if event := last.get("undo"):
            made = "a demotion made training diverge and was undone"
            yield event, f"{made}{_at(event)}"
        if event := last.get("give_up"):
            reason = event.get("message", "").removeprefix("gives up: ")
            yield event, f"the tuner gave up: {reason.partition('. ')[0]}"
        yield from self._end()
        if event := last.get("sign_off"):
            yield None if event["within"] else event, event["message"]

    def interruption(self):
        """That somebody has ended it, which is no finding."""
        if event := self._interrupted:
            yield f"interrupted in step {event['at_step']:,}"

    def _end(self):
        """What has ended it before its last epoch."""
        last = self._last
        if event := last.get("stopped"):
            yield event, f"the monitor stopped training{_at(event)}"
        if event := last.get("step_raised"):
            again = "taken again: " * bool(event.get("repaired"))
            raised = f"step {event['at_step']:,} raised {event['reason']}"
            yield event, again + raised
        if event := last.get("fit_raised"):
            at = f"training ended in step {event['at_step']:,}"
            yield event, f"{at}: {event['reason']}"

    def state(self):
        """The first of `STATES` that is true."""
        lost = self._verdicts.get("weights_lost")
        dead = bool(lost or self._has_diverged()) and not self._has_returned()
        raised = self._last.get("step_raised", {"repaired": True})
        ended = {"stopped", "fit_raised"} & self._kinds
        if dead or ended or not raised.get("repaired"):
            return "failing"
        is_open = [v for v in self._causes if not self._is_over(v)]
        stuck = self._is_stuck() or "give_up" in self._kinds
        if self._is_collapsed() or is_open and stuck:
            return "failing"
        # As grave as what is found: both stand side by side.
        if any(KINDS[v["verdict"]].level == "bad" for v in is_open):
            return "severe"
        if {"undo", *_ODD} & self._kinds or self._low_scales:
            return "warning"
        unexplained = self._nonfinite_losses and not self._causes
        if is_open or self._is_stuck() or unexplained:
            return "warning"
        signed = self._last.get("sign_off", {"within": True})
        if "no_loss_scaling" in self._kinds or not signed["within"]:
            return "warning"
        if self._is_policy_lost:
            return "warning"
        if not self.quiet:
            return "repaired"
        if not is_low(self._facts.layers) or self._facts.examined:
            return "healthy"
        return "not_compared" if self._facts.measured else _UNKNOWN

    def _is_stuck(self):
        return self._facts.in_a_row >= STUCK

    def _is_collapsed(self):
        # One that was followed by good steps is over.
        return "scale_collapsed" in self._verdicts and self._facts.in_a_row > 0

    def _has_diverged(self):
        return has_diverged(self._verdicts.get("divergence", {}))

    def _has_returned(self):
        """Whether training went on from a good state, and is still well."""
        event = self._last.get("return")
        lost = [self._verdicts[k] for k in _LOST if k in self._verdicts]
        return (
            event is not None
            and event["done"]
            and all(v["step"] <= event["step"] for v in lost)
        )

    def _is_over(self, verdict):
        """Whether the layer computes in what it needs by now."""
        kind, layer = verdict["verdict"], verdict["layer"]
        if kind in _LOST:
            return self._has_returned()
        if self._scale_set(verdict):
            return True
        if not KINDS[kind].repaired_by or layer is None:
            return False
        return is_repaired(kind, self._now.get(layer)) or self._is_returned(
            layer
        )

    def _scale_set(self, verdict):
        return scale_set(verdict, self._facts.events)

    def _is_returned(self, layer):
        """Whether it was demoted, and found sound in 16 bits since."""
        kinds = [e["kind"] for e in self._changes if layer in e["layers"]]
        return kinds[-1:] in (["promote"], ["shrink"])

    def _demoted_at(self, layer):
        demotions = [
            event["step"]
            for event in self._changes
            if event["kind"] == "demote"
            and not event.get("dry_run")
            and layer in event["layers"]
        ]
        return demotions[-1]

    def _is_like(self, verdict, first):
        """Whether two findings are counted as one."""
        if self._is_over(first):
            return self._is_over(verdict)
        alike = verdict["verdict"] == first["verdict"]
        return alike and not self._is_over(verdict)

    def _describe(self, first, alike):
        kind, over = first["verdict"], self._is_over(first)
        if kind == "bad_data":
            return bad_data_clause(first, self._facts.events)
        if kind == "divergence":
            numbers = first.get("numbers", {})
            part = numbers.get("not_finite", "loss")
            what = "training diverged, and float32 would not help"
            if not self._has_diverged():
                verb = "are" if part == "gradients" else "is"
                what = f"the {part} {verb} not finite in float32 either"
            if cause := cause_in_words(numbers):
                what = f"{what.partition(',')[0]}{cause}"
            return f"{what}{self._found(first)}"
        if clause := KINDS[kind].clause:
            said = clause.format(**first.get("numbers", {}))
            return f"{said}{self._found(first)}"
        if kind == "policy":
            return "16-bit variables lose small updates"
        if kind == "scale_too_low":
            return (
                "gradients vanished at too low a loss scale"
                f"{self._found(first)}{self._fate(first)}"
            )
        others = 0 if over else len(alike) - 1
        more = f" and {format_count(others, 'more layer')}" if others else ""
        at = self._found(first, "first " if others else "")
        names = _named(first) + more
        what = KINDS[kind].phrase
        if "overflows_in_steps" in first.get("numbers", {}):
            what = "was about to overflow"
        return f"{names} {what}{at}{self._fate(first, bool(others))}"

    def _found(self, verdict, first=""):
        """When it was found, and since when steps have failed if that is known.

        It may have begun before, but not before the first step.
        """
        at, since = _at(verdict), verdict.get("failing_since")
        # Steps count on over all fits of a log.
        if at and _step(verdict) < self._facts.first - 1:
            at += " in an earlier fit"
        if since is not None:
            # Said once, if it was found there as well.
            begun = since < self._facts.first and "earlier fit" not in at
            earlier = " of an earlier fit" * begun
            failed = f"steps began to fail at step {since:,}{earlier}"
            return f" ({first}found{at}; {failed})"
        return f" ({first}found{at})" if at else ""

    def _fate_of_scale(self):
        found = filter(None, map(self._scale_set, self._causes))
        if (event := next(found, None)) is None:
            return ""
        done = SCALE_CHANGES[event["kind"]]
        return (
            f", and the loss scale was {done} to {format_power(event['after'])}"
        )

    def _fate(self, first, several=False):
        """What has become of it, to end the sentence about it."""
        layer = first["layer"]
        if self._scale_set(first):
            fate = self._fate_of_scale()
            if self.demoted:
                count = format_count(len(self.demoted), "layer")
                dtypes = " and ".join(sorted({*self.demoted.values()}))
                fate += f" and {count} demoted to {dtypes}"
            return fate
        if asks_for_scale(first):
            return ""
        if self._is_over(first):
            if layer not in self.demoted:
                now = self._now.get(layer)
                back = self._is_returned(layer)
                return f" and {'has returned to' if back else 'is in'} {now}"
            others = len(self.demoted) - 1
            beside = (
                f" together with {format_count(others, 'more layer')}"
                if others
                else ""
            )
            done = self._demoted_at(layer)
            at = "" if done == _step(first) else f" {format_moment(done)}"
            fate = f" and was demoted to {self.demoted[layer]}{at}{beside}"
            return fate + self._fate_of_scale()
        for event in self._changes:
            if event.get("dry_run") and layer in event["layers"]:
                after = dtype_of(event["layers"][layer]["after"])
                return f" and would be demoted to {after} (dry run)"
        now = self._now.get(layer)
        are = "are" if several else "is"
        return f" and {are} still in {now}" if now else ""


def _named(verdict):
    layer = repr(verdict["layer"]) if verdict["layer"] else "the model"
    model = verdict.get("numbers", {}).get("in_call_of")
    return f"the own call of {model} after {layer}" if model else layer


def _step(event):
    return event.get("at_step", event.get("step"))


def _at(event):
    step = _step(event)
    return "" if step is None else f" {format_moment(step)}"


def _is_cause(kind):
    """Whether a kind of verdict is not brought about by another."""
    return kind in KINDS and KINDS[kind].behind < 2
