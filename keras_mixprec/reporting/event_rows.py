"""What a log's events say: the rows of the list of events, in words."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from keras_mixprec.formats import (
    BATCHES,
    STEPS,
    format_count,
    format_digits,
    format_kinds,
    format_names,
    format_power,
)
from keras_mixprec.reporting.event_kinds import EVENTS, Event
from keras_mixprec.reporting.facts import dtype_of
from keras_mixprec.reporting.text_formats import to_json

# Shapes repeat what colours say, for readers who cannot distinguish these.
_GLYPHS = {"bad": "▲", "warning": "◆", "info": "●"}

_FIXES = {
    "training": "Fix for training",
    "plan": "Fix for all next runs: save these dtypes as plan.json",
    "inference": "Fix for inference",
    "data": "Rows to drop",
    "diagnosis": "Code that finds the cause",
}


def rows_of_events(events: list) -> list[dict]:
    """Returns the rows of the list of events.

    Steps that were skipped in a row are one row, and so are verdicts that say
    the same of several layers.

    Args:
        events: List of dicts, as `RunData.overview` has them.

    Returns:
        List of dicts by rising step. `"events"` are the places of its events
        among those of the run, `"steps"` when they were, `"kind"` and
        `"level"` those of the first, `"title"`, `"text"` and `"details"` what
        they say, `"layers"` what they are about, `"lane"` where they are
        marked, `None` if they are not, `"noticed"` and `"wall_time"` when the
        first was logged, `"fixes"` what repairs it, code by its
        title, and `"key"` differs between rows.
    """
    places = {id(event): place for place, event in enumerate(events)}
    rows = [_row(group, places) for group in _groups(events)]
    return sorted(rows, key=lambda row: row["steps"][0])


def counts_by_kind(events: list, skipped: int) -> dict:
    """Returns how many events there are of each kind, with its title.

    Of skipped steps how many steps they are: several optimizers may skip the
    same.

    Args:
        events: List of dicts, as `RunData.overview` has them.
        skipped: Int. In how many steps updates were skipped.
    """
    counts = Counter(event["kind"] for event in events)
    steps = {moment(e) for e in events if e["kind"] == "skipped_step"}
    known = {
        "skipped_step": len(steps),
        "skipped_steps_not_kept": max(skipped - len(steps), 0),
    }
    return {
        kind: {
            "title": _title_of_kind(kind),
            "count": known.get(kind, count),
        }
        for kind, count in counts.items()
    }


def moment(event: Mapping) -> int:
    """Returns the step at which something was, not when it was noticed.

    How far a loss scale fell is of the reading that says so.
    """
    if event["kind"] == "loss_scale_low":
        return event["step"]
    return event.get("at_step", event.get("first_step", event["step"]))


def title_of(event: Mapping) -> str:
    """Returns what an event is called."""
    kind = event["kind"]
    if kind == "verdict":
        return words(event["verdict"])
    if kind == "loss_scale_low" and event.get("cause") == "bad_data":
        return "loss scale lowered by bad data"
    if kind == "before_training":
        return words(event["finding"])
    return _title_of_kind(kind)


def _title_of_kind(kind):
    return EVENTS.get(kind, Event()).title or words(kind)


def mark_of(title: str, level: str, repaired: bool) -> dict:
    """Returns a finding as its shape and text, and its level.

    Args:
        title: String.
        level: String, one of `LEVELS`.
        repaired: Boolean.
    """
    if repaired:
        return {"text": f"✓ {title}, repaired", "level": "fine"}
    return {"text": f"{_GLYPHS[level]} {title}", "level": level}


def with_advice(event: Mapping) -> str:
    """Returns an event's message, what it has cost, and what to do."""
    said = filter(None, (event.get("message"), event.get("harm")))
    clauses = [f"{text[:1].upper()}{text[1:]}." for text in said]
    return " ".join([*clauses, event.get("advice", "")]).rstrip()


def words(name: str) -> str:
    """Returns a name of the log as words."""
    return str(name).replace("_", " ")


def _groups(events):
    groups, skips, verdicts = [], {}, {}
    for event in events:
        group = [event]
        if event["kind"] == "skipped_step":
            name = event.get("optimizer", "")
            # Others may skip the same steps.
            before = skips.get(name)
            if before and _follows(event, before[-1]):
                before.append(event)
                continue
            skips[name] = group
        elif event["kind"] == "verdict":
            about = event["step"], event["verdict"], event["direction"]
            if first := verdicts.get((*about, event.get("same_as"))):
                first.append(event)
                continue
            verdicts.setdefault((*about, event["layer"]), group)
        groups.append(group)
    return groups


def _follows(event, before):
    # Bad data are another cause.
    alike = bool(event.get("bad_input")) == bool(before.get("bad_input"))
    return alike and moment(event) == moment(before) + 1


def _row(group, places):
    event, kind = group[0], group[0]["kind"]
    try:
        said = _said(group)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        # An event of somebody else's, or a damaged one, has any values.
        said = _in_json(event)
    about = event.get("verdict") or event.get("finding") or moment(event)
    date = event.get("wall_time")
    key = kind, event["step"], date, about, *said["layers"][:1]
    return {
        "key": "|".join(map(str, key)),
        "events": [places[id(e)] for e in group],
        "kind": kind,
        "level": event["level"],
        "steps": [*dict.fromkeys(map(moment, group))],
        "noticed": event["step"],
        "wall_time": date,
        "lane": EVENTS.get(kind, Event()).lane,
        **said,
    }


def _said(group):
    event = group[0]
    kind = event["kind"]
    write, said = _WRITE.get(kind), EVENTS.get(kind, Event()).says
    if not (write or said):
        return _in_json(event)
    layers = [e["layer"] for e in group if e.get("layer")]
    fixes = event.get("fix", {}).items()
    return {
        "title": title_of(event),
        "text": write(group) if write else said.format_map(_Words(event)),
        "details": [*_details(group)],
        "layers": layers or [*event.get("layers", {})],
        "fixes": {_FIXES.get(use, use): code for use, code in fixes},
    }


def _in_json(event):
    known = ("kind", "step", "wall_time", "level")
    rest = {name: x for name, x in event.items() if name not in known}
    text = f"{event['kind']} {to_json(rest)}"
    named = {"title": words(event["kind"]), "text": text}
    return named | {"details": [], "layers": [], "fixes": {}}


class _Words(dict):
    """The values of an event as a sentence has them, whatever they are."""

    def __init__(self, event):
        super().__init__({n: _value(n, x) for n, x in event.items()})
        if "first_step" in event:
            ends = self["first_step"], self["last_step"]
            self["span"] = " between steps {} and {}".format(*ends)
        if isinstance(event.get("steps"), list):
            self["steps"] = format_count(len(event["steps"]), "step")

    def __missing__(self, name):
        return {"layer": "a layer", "lost": "0", "count": "0"}.get(name, "")


def _value(name, value):
    number = _number(value)
    if number is None:
        return value
    if name.endswith("scale"):
        return format_power(number)
    return f"{value:,}" if isinstance(value, int) else format_digits(number)


def _number(value):
    """A number that a log has, spelled if it is infinite, or `None`."""
    spelled = isinstance(value, str) and value in ("inf", "-inf", "nan")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if spelled:
        return float(value)
    return value if is_number else None


def _skipped(group):
    first, last = group[0], group[-1]
    name = first.get("optimizer")
    of = f" of {name}" if name else ""
    from_, to = (_value("scale", e.get("scale", "?")) for e in (first, last))
    why = _why_skipped(group)
    if first is last:
        return f"Update{of} skipped at loss scale {from_}: {why}"
    scale = from_ if from_ == to else f"{from_} → {to}"
    return (
        f"{format_count(len(group), 'update')}{of} skipped in a row, steps "
        f"{moment(first):,} to {moment(last):,}, at loss scale {scale}: {why}"
    )


def _why_skipped(group):
    first = group[0]
    if first.get("bad_input"):
        which = "these batches were" if group[1:] else "the batch was"
        return (
            f"{which} not finite, first in {_rows(first['bad_input'])}, which "
            "no loss scale or dtype changes."
        )
    variables = dict.fromkeys(v for e in group for v in e.get("variables", []))
    kinds: list = []
    for event in group:
        for found in event.get("kinds", {}).values():
            kinds += found if isinstance(found, list) else [found]
    where = f" in {format_names(map(str, variables), 2)}" if variables else ""
    seen = [*dict.fromkeys(map(str, kinds))]
    listed = f" ({', '.join(seen)})" if seen else ""
    loss = ", ".join(map(str, first.get("loss", [])))
    if loss:
        return f"loss {loss}, gradients not finite{where}{listed}."
    # A finite loss, and no gradient that is NaN.
    search = (
        " The loss scale was too high for them: a dynamic one is lowered by "
        "that, which is how it finds its height, and harmless while few steps "
        "are."
    )
    found = bool(seen) and all(kind.endswith("inf") for kind in seen)
    return f"gradients not finite{where}{listed}.{search * found}"


def _rows(parts):
    if not isinstance(parts, dict):
        return ""
    found = (f"row {row} of the batch's {part}" for part, row in parts.items())
    return ", ".join(found)


def _verdict(group):
    event, since = group[0], group[0].get("failing_since")
    failing = f", failing since step {since:,}" if since is not None else ""
    at = f"{event['layer']}{failing}: " if event["layer"] else ""
    by = event.get("numbers", {}).get("found_by")
    who = f"Found by {by}. " if by else ""
    others = [e["layer"] for e in group[1:]]
    count = format_count(len(others), "more layer")
    same = f" The same in {count}: {', '.join(others)}." if others else ""
    said = event["advice"] or words(event["verdict"])
    return f"{at}{who}{said}{same}"


def _before_training(group):
    event = group[0]
    at = f"{event['layer']}: " if event.get("layer") else ""
    said = f"{event['message']} {event.get('advice', '')}"
    return f"Before training: {at}{said}".rstrip()


def _changed(verb, dry=None):
    def write(group):
        event = group[0]
        changes = event.get("layers", {})
        if not changes:
            return f"{verb} {event.get('message', '')}".rstrip(" .") + "."
        after = dtype_of(next(iter(changes.values()))["after"])
        reason = next(iter(event.get("because", {}).values()), "")
        why = f": {reason}" if reason else ""
        done = dry if dry and event.get("dry_run") else verb
        return f"{done} {format_names(changes, 2)} to {after}{why}."

    return write


def _undo(group):
    return group[0].get("message") or _changed("Undone: returned")(group)


def _nonfinite(what, units):
    def write(group):
        event = group[0]
        name = event.get("optimizer")
        of = f" of {name}" if name else ""
        return f"Non-finite {what}{of}: {format_kinds(event['counts'], units)}."

    return write


def _bad_batches(group):
    event = group[0]
    batches = event.get("batches") or []
    if not batches or not isinstance(batches[0], dict):
        return event["message"]
    step = _value("step", batches[0].get("step", "?"))
    count = event["count"]
    if count > 1:
        return (
            f"Inputs not finite in {count:,} batches, the first at step {step}."
        )
    return f"Inputs not finite in the batch of step {step}."


def _trend(group):
    said = _Words(group[0])
    soon = said["overflows_in_steps"]
    when = f", overflow expected in {soon} steps" if soon else ""
    return f"{said['layer']}: {said['headroom_bits']} bits left{when}."


def _no_loss_scaling(group):
    by = group[0].get("by") == "train_step"
    if group[0].get("by") == "apply":
        return "train_step never called optimizer.apply."
    who = "train_step does not scale" if by else "nothing scales"
    return f"Layers compute in float16 and {who} the loss."


def _train_end(group):
    # Its first sentence, of which lines after the first are indented.
    summary = group[0].get("summary", "Training ended.")
    return summary.replace("\n    ", " ").split("\n")[0]


def _step_raised(group):
    said = EVENTS["step_raised"].says.format_map(_Words(group[0]))
    again = "; it was taken again with the repair"
    return said + again * bool(group[0].get("repaired"))


def _advised(group):
    return with_advice(group[0])


_WRITE: dict[str, Callable] = {
    "skipped_step": _skipped,
    "nonfinite_losses": _nonfinite("loss", BATCHES),
    "nonfinite_gradients": _nonfinite("gradients", STEPS),
    "verdict": _verdict,
    "before_training": _before_training,
    "demote": _changed("Demoted", "Would demote"),
    "shrink": _changed("Returned"),
    "promote": _changed("Returned"),
    "loss_scaling": _changed("Loss scaling:"),
    "undo": _undo,
    "return": lambda group: f"The tuner {group[0]['message']}.",
    "bad_batches": _bad_batches,
    "trend": _trend,
    "no_loss_scaling": _no_loss_scaling,
    "train_end": _train_end,
    "step_raised": _step_raised,
    **dict.fromkeys(
        ("loss_scale_low", "metric_not_finite", "validation_not_finite"),
        _advised,
    ),
}


# What numbers of a verdict are called; others are called as in the log.
_NUMBERS = {
    "code": "line of your code",
    "operation": "what it computed",
    "error": "error against float32",
    "error_of_change": "error of its change against float32",
    "largest_input": "largest number that it received",
    "largest_output_in_float32": "largest number that it returns, computed in "
    "float32",
    "largest_inside_in_float32": "largest number inside the layer, computed in "
    "float32",
    "smallest_inside_in_float32": "smallest number but 0 inside the layer, "
    "computed in float32",
    "largest_gradient_in_float32": "largest gradient, computed in float32",
    "batch_rows": "rows of the batch in which it fails",
    "batch_rows_in_all": "rows of the batch in which it fails, in all",
    "nonfinite_outputs": "numbers that it returned infinite or NaN",
    "nonfinite_gradients": "gradients that were infinite or NaN",
    "loss_scale_bits": "loss scale",
    "compared_at_bits": "loss scale of the comparison with float32",
    "lowest_bits": "lowest loss scale that its gradients fit",
    "highest_bits": "highest loss scale that its gradients fit",
    "advised_bits": "loss scale that suits",
    "needed_bits": "loss scale that gradients need",
    "fell_from_bits": "loss scale before it fell",
    "headroom_bits": "headroom",
    "overflows_in_steps": "steps until an overflow is expected",
}
_LIMITS = {
    "largest_inside_in_float32": "; float16 holds up to 65,504",
    "smallest_inside_in_float32": "; float16 holds down to 6e-08",
}
# Where bad batches were, in their epochs: their steps are told.
_PLACES = ("epoch", "batch", "batches")


def _details(group) -> Iterator[str]:
    event = group[0]
    yield from _bad_rows(group)
    if event.get("message") and event.get("layers"):
        # The sentence has what comes first.
        yield from event["message"].split("; ")[1:]
    if way := event.get("direction"):
        in_ = "update of weights" if way == "update" else f"{way} pass"
        yield f"in the {in_}"
    if event["kind"] == "verdict":
        first, *others = ([*_numbers(e)] for e in group)
        yield from first
        for other, found in zip(group[1:], others, strict=True):
            if found:
                yield f"{other['layer']}: {'; '.join(found)}"
    for path, change in event.get("layers", {}).items():
        reason = event.get("because", {}).get(path)
        why = f" ({reason})" if reason else ""
        yield f"{path}: {change.get('before')} → {change['after']}{why}"
    if event.get("variables"):
        yield f"variables: {', '.join(map(str, event['variables']))}"
    yield from filter(None, (event.get("summary"), event.get("details")))


def _bad_rows(group):
    """Which rows belong to which batch, of one step or of several."""
    event = group[0]
    if event["kind"] == "bad_batches":
        found = [b for b in event.get("batches") or [] if isinstance(b, dict)]
        pairs = [(b.get("step"), b.get("rows")) for b in found]
    else:
        pairs = [(moment(e), e.get("bad_input")) for e in group]
    for step, rows in pairs:
        if listed := _rows(rows):
            yield (
                f"batch of step {_value('step', step)}: not finite, first in "
                f"{listed} (rows count from 0)"
            )


def _numbers(verdict):
    for name, value in verdict.get("numbers", {}).items():
        if verdict["verdict"] == "bad_data" and name in _PLACES:
            continue
        title, number = _NUMBERS.get(name, words(name)), _number(value)
        if number is None:
            listed = value if isinstance(value, list) else [value]
            text = ", ".join(map(str, listed))
        elif name == "headroom_bits":
            text = f"{format_digits(number)} bits"
        elif name in _NUMBERS and name.endswith("_bits"):
            text = format_power(2.0**number)
        else:
            text = _value(name, value) + _LIMITS.get(name, "")
        # Rows of a batch are beside its skipped step.
        is_all = name.startswith("samples_of_")
        of = ", counted from 0 in the whole array" if is_all else ""
        yield f"{title}{of}: {text}"
