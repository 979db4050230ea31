"""The headline of a run: one sentence about the cause, the repair and the cost.

The console builds the headline from facts in memory. The report and the tab
build the headline from the log.
All use this module, so that they agree.
"""

import collections
from collections.abc import Callable, Iterable, Iterator

from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.formats import (
    SIXTEEN_BITS,
    format_count,
    format_moment,
    format_names,
    format_power,
    format_share,
)
from keras_mixprec.reporting.bad_input import bad_data_clause
from keras_mixprec.reporting.facts import (
    LEVELS,
    SCALE_CHANGES,
    STORY,
    Facts,
    asks_for_scale,
    changes_of,
    dtype_of,
    dtypes_now,
    has_diverged,
    is_repaired,
    kind_of,
    level_of,
    low_scales,
    moment,
    scale_set,
    still_said,
)
from keras_mixprec.verdict_kinds import KINDS, LOST, cause_in_words

# The states of a run, the most severe first.
STATES = (
    "failing",
    "severe",
    "warning",
    "not_measured",
    "not_compared",
    "repaired",
    "healthy",
)

# The number of consecutive skipped steps at which training counts as stuck. A
# search for the loss scale skips fewer.
STUCK = 5

# Clauses that say why loss scaling has no effect.
_UNSCALED = {
    "train_step": "`train_step` does not scale the loss: small gradients "
    "vanish in float16",
    "apply": "no step of this run called `optimizer.apply`, so the loss scale "
    "has no effect",
}

# Kinds of warnings that have a message of their own, and for each the kind of
# event that ends the warning.
_ODD = {
    "metric_not_finite": "metric_finite",
    "validation_not_finite": "validation_finite",
}


def headline(facts: Facts) -> dict:
    """Describes a run in one sentence.

    Args:
        facts: `Facts`.

    Returns:
        Dict with `"text"`, the sentence, and `"state"`, one of `STATES`:

        - `"failing"`: training makes no progress;
        - `"severe"`: a finding harms training;
        - `"warning"`: a finding or a flat loss needs attention;
        - `"not_measured"`: no range was measured;
        - `"not_compared"`: no step was compared with float32;
        - `"repaired"` and `"healthy"`.

    Example:
    >>> from keras_mixprec.reporting.facts import Facts
    >>> from keras_mixprec.reporting.headline import headline
    >>> layer = {"path": "a", "compute_dtype": "float16"}
    >>> headline(Facts([], [layer], 9, {"": 0}, 0, measured=True))["text"]
    '9 steps, none skipped; 100% of FLOPs in 16 bits; not compared with \
float32 yet.'
    """
    story = _Story(facts)
    clauses = [clause for _, clause in story.clauses()]
    clauses += [*story.standstill(), _steps(facts, story.quiet)]
    clauses += story.interruption()
    clauses += [*_share(facts.layers, bool(story.demoted), story.why_wide())]
    if story.quiet and is_low(facts.layers) and not facts.examined:
        clauses += [] if facts.measured else ["no range measured"]
        clauses.append("not compared with float32 yet")
    text = "; ".join(clauses)
    if not story.names_layer:
        text = text[:1].upper() + text[1:]
    return {"text": f"{text}.", "state": story.state()}


def main_finding(facts: Facts) -> dict | None:
    """Returns the finding that the headline begins with.

    Args:
        facts: `Facts`.

    Returns:
        Dict with `"event"`, one of `facts.events`; `"repaired"`, true if the
        fault is repaired; and `"level"`, one of `LEVELS`. `None` if there is no
        finding.
    """
    story = _Story(facts)
    named = (event for event, _ in story.clauses() if event)
    event = next(named, story.unnamed)
    if event is None:
        return None
    level = level_of(event)
    # Only verdicts can be harmless. Any other finding is at least a warning.
    if event["kind"] != "verdict" and level != "bad":
        level = "warning"
    is_over = event["kind"] == "verdict" and bool(story.is_over(event))
    return {"event": event, "repaired": is_over, "level": level}


def is_low(layers: Iterable) -> bool:
    """Returns whether any layer computes in 16 bits."""
    return any(layer["compute_dtype"] in SIXTEEN_BITS for layer in layers)


def over_by(events: Iterable, layers: list) -> Callable:
    """Returns a function that names the repair of a verdict, if any.

    Args:
        events: Dicts, by rising step.
        layers: List of dicts, the table of layers as it is now.
    """
    events = [*events]
    now, changed = dtypes_now(events, layers), changes_of(events)

    def said(verdict):
        kind, layer = verdict["verdict"], verdict["layer"]
        if kind in LOST:
            return _way_back(events)
        if change := scale_set(verdict, events):
            done = SCALE_CHANGES[change["kind"]]
            scale = format_power(change["after"])
            return f"the loss scale was {done} to {scale}"
        if layer is None or not kind_of(kind).repaired_by:
            return None
        if is_repaired(kind, now.get(layer)):
            return f"it is in {now[layer]}"
        # The layer was demoted and has since returned to 16 bits.
        back = layer in changed and changed[layer][0]["kind"] in _BACK
        return f"it has returned to {now.get(layer)}" if back else None

    return said


_BACK = ("promote", "shrink")


def _way_back(events):
    """Says how training returned to a good state, if it stayed there."""
    for event in reversed(events):
        if event["kind"] == "undo":
            return "a demotion was undone"
        if event["kind"] == "return":
            done = event.get("done")
            return f"training went on with {done}" if done else None
        if event.get("verdict") in LOST:
            return None
    return None


def ranked(verdicts: Iterable, is_over: Callable) -> list:
    """Returns verdicts, the most important first, without mere symptoms.

    Args:
        verdicts: Dicts.
        is_over: Function that says whether a verdict is repaired.
    """

    def order(verdict):
        kind = kind_of(verdict["verdict"])
        return bool(is_over(verdict)), kind.behind, LEVELS.index(kind.level)

    found = sorted(verdicts, key=order)
    causes = [v for v in found if kind_of(v["verdict"]).behind < _SYMPTOM]
    return causes or found


# Values of `Kind.behind`: an effect follows from a cause, and a symptom says
# nothing more once the cause is known.
_EFFECT, _SYMPTOM = 2, 3

# Clauses for what the callbacks did and for errors that training raised, in the
# order of the headline.
_OUTCOMES = {
    "return": "the tuner returned to the state of step {to} {at} and {then}",
    "undo": "a demotion made training diverge and was undone {at}",
    "give_up": "the tuner gave up: {why}",
    "stopped": "the monitor stopped training {at}",
    "step_raised": "step {at_step:,}{again} raised {reason}",
    "fit_raised": "training ended at step {at_step:,}: {reason}",
}


class _Story:
    """Turns the events of a run into clauses, and knows what is repaired."""

    def __init__(self, facts):
        self._facts = facts
        events = [e for e in facts.events if e["kind"] in STORY]
        self._interrupted = [e for e in events if e.get("interrupted")]
        events = [e for e in events if not e.get("interrupted")]
        self._last = {event["kind"]: event for event in events}
        self._warned = low_scales(events)
        for kind, end in _ODD.items():
            self._warned += still_said(events, kind, end).values()
        self._now = dtypes_now(events, facts.layers)
        self.is_over = over_by(events, facts.layers)
        self._events = events
        demoted = changes_of(events, "demote").items()
        self.demoted = {p: x for p, x in demoted if x[1] == self._now.get(p)}
        verdicts = [e for e in events if e["kind"] == "verdict"]
        self._first = {e["verdict"]: e for e in verdicts[::-1]}
        self._causes = [
            verdict
            for verdict in ranked(verdicts, self.is_over)
            if verdict["verdict"] in KINDS
            and KINDS[verdict["verdict"]].behind < _EFFECT
        ]
        # A finding that adds no clause to the headline, such as a search for
        # the loss scale.
        self.unnamed = next(iter(verdicts), None)
        self.names_layer = any(v["layer"] for v in self._causes[:1])
        self._wide = self._last.get("no_16_bits", {})
        others = self._last.keys() - _NO_FINDING
        found = verdicts or others or self._warned
        self.quiet = not (found or facts.flat_loss)

    def clauses(self) -> Iterator:
        """Yields pairs of an event and a clause, causes first.

        The event is `None` if the clause cannot be the main finding.
        """
        yield from self._cause()
        yield from self._outcome()

    def _cause(self):
        """Yields clauses about the most important findings."""
        if not self._causes:
            count, event = self._nonfinite_losses()
            effects = {"weights_lost", "scale_collapsed"} & self._first.keys()
            if count and not effects:
                batches = f"{count:,} batch{'es' * (count > 1)}"
                said = f"the loss itself was not finite in {batches}"
                yield event, f"{said}, and no loss scale can repair it"
            if event := self._last.get("no_loss_scaling"):
                usual = "float16 without loss scaling: small gradients vanish"
                yield event, _UNSCALED.get(event.get("by"), usual)
            return
        first, *_ = self._causes
        alike = [v for v in self._causes if self._is_like(v, first)]
        others = [v for v in self._causes if not self._is_like(v, first)]
        yield first, self._describe(first, alike)
        done = [v for v in others if v["layer"] in self.demoted]
        done = [v for v in done if self.is_over(v)]
        if done:
            yield None, self._describe(done[0], done)
        if (more := len(others) - len(done)) > 0:
            yield None, format_count(more, "more finding")

    def _nonfinite_losses(self):
        found = [e for e in self._events if e["kind"] == "nonfinite_losses"]
        count = sum(sum(event["counts"].values()) for event in found)
        return count, self._last.get("nonfinite_losses")

    def _outcome(self):
        """Yields clauses about the events that followed from the causes."""
        last = self._last
        event = self._first.get("weights_lost")
        if event and not self.is_over(event):
            when = "" if self._causes else self._found(event)
            yield event, f"weights are not finite{when}"
        elif self._is_collapsed() and not self._causes:
            event = self._first["scale_collapsed"]
            yield event, "the loss scale reached its minimum"
        yield from ((event, event["message"]) for event in self._warned)
        for kind, clause in _OUTCOMES.items():
            if event := last.get(kind):
                yield event, clause.format_map(event | _words_of(event))
        if event := last.get("sign_off"):
            yield None if event["within"] else event, event["message"]

    def why_wide(self):
        """Says why no layer computes in 16 bits, if known."""
        return self._wide.get("message", "")

    def standstill(self):
        """Says that the loss did not fall, unless a finding explains it."""
        if self._facts.flat_loss and self.state() != "failing":
            yield "the loss did not fall"

    def interruption(self):
        """Says that somebody ended the run, which is not a finding."""
        for event in self._interrupted[:1]:
            yield f"interrupted in step {event['at_step']:,}"

    def state(self):
        """Returns the most severe state that applies."""
        last, facts = self._last, self._facts
        is_open = [v for v in self._causes if not self.is_over(v)]
        is_stuck = facts.in_a_row >= STUCK
        raised = last.get("step_raised", {"repaired": True})
        if (
            self._is_lost()
            or {"stopped", "fit_raised"} & last.keys()
            or not raised.get("repaired")
            or self._is_collapsed()
            or (is_open and (is_stuck or "give_up" in last))
        ):
            return "failing"
        # The worst finding that is not repaired decides the state of the run.
        if any(kind_of(v["verdict"]).level == "bad" for v in is_open):
            return "severe"
        if (
            is_open
            or is_stuck
            or self._warned
            or facts.flat_loss
            or {"undo", "no_loss_scaling"} & last.keys()
            or (self._nonfinite_losses()[0] and not self._causes)
            or not last.get("sign_off", {"within": True})["within"]
            or self._wide.get("lost")
        ):
            return "warning"
        if not self.quiet:
            return "repaired"
        if not is_low(facts.layers) or facts.examined:
            return "healthy"
        return "not_compared" if facts.measured else "not_measured"

    def _is_lost(self):
        lost = self._first.get("weights_lost") or self._first.get("divergence")
        return bool(
            lost
            and (lost["verdict"] == "weights_lost" or has_diverged(lost))
            and not self.is_over(lost)
        )

    def _is_collapsed(self):
        # A collapse of the loss scale is over once a step is applied.
        return "scale_collapsed" in self._first and self._facts.in_a_row > 0

    def _is_like(self, verdict, first):
        """Returns whether one clause covers both findings."""
        if self.is_over(first) or self.is_over(verdict):
            return bool(self.is_over(first)) and bool(self.is_over(verdict))
        return verdict["verdict"] == first["verdict"]

    def _describe(self, first, alike):
        name, numbers = first["verdict"], first.get("numbers", {})
        kind = kind_of(name)
        if name == "bad_data":
            return bad_data_clause(first, self._facts.events)
        if name == "divergence":
            part = numbers.get("not_finite", "loss")
            verb = "are" if part == "gradients" else "is"
            what = f"the {part} {verb} not finite in float32 either"
            if has_diverged(first):
                what = "training diverged, and float32 would not help"
            if cause := cause_in_words(numbers):
                what = f"{what.partition(',')[0]}{cause}"
            return f"{what}{self._found(first)}"
        if kind.clause:
            said = kind.clause.format_map(collections.defaultdict(str, numbers))
            return f"{said}{self._found(first)}{self._fate(first)}"
        more = 0 if self.is_over(first) else len(alike) - 1
        names = _named(first)
        names += f" and {format_count(more, 'more layer')}" if more else ""
        what = kind.phrase
        if "overflows_in_steps" in numbers:
            what = "was about to overflow"
        code = numbers.get("code")
        line = f" at {code}" if code and not self.is_over(first) else ""
        at = self._found(first, "first " if more else "")
        return f"{names} {what}{line}{at}{self._fate(first, bool(more))}"

    def _found(self, verdict, first=""):
        """Says when a finding was made, and when steps began to fail."""
        if "step" not in verdict:
            return ""
        at, since = format_moment(moment(verdict)), verdict.get("failing_since")
        # Step numbers continue from one call to `fit` to the next.
        is_old = moment(verdict) < self._facts.first - 1
        by = verdict.get("numbers", {}).get("found_by")
        who = f" by {by}" if by else ""
        found = f"{first}found{who} {at}{' in an earlier fit' * is_old}"
        if since is None:
            return f" ({found})"
        earlier = since < self._facts.first and not is_old
        of = " of an earlier fit" * earlier
        return f" ({found}; steps began to fail at step {since:,}{of})"

    def _fate(self, first, several=False):
        """Says what was done about a finding, as the end of its clause."""
        layer, over = first["layer"], self.is_over(first)
        if scale_set(first, self._facts.events):
            return f", and {over}"
        if asks_for_scale(first) or layer is None:
            return ""
        if layer in self.demoted and over:
            event, dtype = self.demoted[layer]
            same = event["step"] == moment(first)
            at = "" if same else f" {format_moment(event['step'])}"
            others = (repr(path) for path in self.demoted if path != layer)
            named = format_names(others, 2, "layer")
            beside = f" together with {named}" if named else ""
            return f" and was demoted to {dtype}{at}{beside}"
        if over:
            return f" and {over.removeprefix('it ')}"
        for event in self._events:
            if event.get("dry_run") and layer in event.get("layers", {}):
                after = dtype_of(event["layers"][layer]["after"])
                return f" and would be demoted to {after} (dry run)"
        verb, now = "are" if several else "is", self._now.get(layer)
        return f" and {verb} still in {now}" if now else ""


# Events that are not findings, or that other code reports.
_NO_FINDING = {
    "sign_off",
    "no_16_bits",
    "loss_scale_low",
    "loss_scale_recovered",
    *_ODD.values(),
    *_ODD,
}


def _words_of(event):
    """Returns values for `_OUTCOMES` that are not fields of the event."""
    reason = event.get("message", "").removeprefix("gives up: ")
    done = event.get("done")
    return {
        "at": format_moment(moment(event)),
        "then": f"went on with {done}" if done else "stopped",
        "why": reason.partition(". ")[0],
        "again": " (repeated after a repair)" * bool(event.get("repaired")),
    }


def _named(verdict):
    layer = repr(verdict["layer"]) if verdict["layer"] else "the model"
    model = verdict.get("numbers", {}).get("in_call_of")
    return f"the call method of {model} after {layer}" if model else layer


def _steps(facts, quiet):
    """Describes the number of steps and of skipped steps."""
    steps, taken = facts.steps, format_count(facts.steps, "step")
    of = ""
    if facts.fits > 1:
        of = (
            f"in fit {facts.fits} of {facts.fits} (from step {facts.first:,}): "
        )
    total = max(facts.skipped.values(), default=0)
    count = sum(e["count"] for e in facts.events if e["kind"] == "spikes")
    what = "a spike" if count == 1 else "spikes"
    spikes = f", {count:,} skipped as {what}" if count else ""
    if not total:
        none = ", none skipped" if facts.skipped and steps else ""
        none = spikes or none
        known = facts.examined or not is_low(facts.layers)
        return f"{of}{taken}{none}{', no findings' * (quiet and known)}"
    last = ""
    if STUCK <= facts.in_a_row < min(steps, total):
        last = f", including the last {facts.in_a_row:,}"
    if len(facts.skipped) > 1:
        own = (
            f"optimizer {name!r} skipped {f'{n:,}' if n else 'none'} of {taken}"
            f"{last * (n == total)}"
            for name, n in sorted(facts.skipped.items())
        )
        return of + "; ".join(own)
    why = ""
    if quiet:
        falling = ", with the loss scale still falling"
        settled = " while the loss scale settled"
        why = falling if facts.in_a_row else settled
    is_all = steps and total >= steps
    count = f"all {taken}" if is_all else f"{total:,} of {taken}"
    return f"{of}{count} skipped{why}{last}{spikes}"


def _share(layers, was_demoted, why):
    """Yields the share of FLOPs in 16 bits, if it is known."""
    share = share_in_16_bits(layers)
    if share is None:
        return
    if not is_low(layers):
        yield why or "no layer in 16 bits"
        return
    # Wider layers may have less than 0.5% of the FLOPs, so that the share of
    # the 16-bit layers rounds to 100%.
    wide = any(x["compute_dtype"] not in SIXTEEN_BITS for x in layers)
    shown = f"{format_share(share)} of"
    if wide and shown == "100% of":
        shown = "nearly all"
    yield f"{shown} FLOPs {'still ' * was_demoted}in 16 bits"
