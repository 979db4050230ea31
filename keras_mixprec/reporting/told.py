"""Describes the events of a run in words, as rows of the event list."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from keras_mixprec.formats import (
    BATCHES,
    STEPS,
    format_count,
    format_digits,
    format_kinds,
    format_names,
    format_power,
    format_share,
)
from keras_mixprec.reporting.event_kinds import EVENTS, Event
from keras_mixprec.reporting.facts import moment, said_alike
from keras_mixprec.reporting.layer_tables import MAX_COLUMNS
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.reporting.what_next import fix_of

# The shapes of marks, for readers who cannot distinguish colors.
_GLYPHS = {"bad": "▲", "warning": "◆", "info": "●"}

# The maximum number of layers that a sentence names.
_MOST_LAYERS = 5

_FIXES = {
    "training": "Fix for training",
    "plan": "Fix for all later runs: save these dtypes as plan.json",
    "data": "Rows to drop",
}


def told(run) -> list[dict]:
    """Returns the rows of the event list of a `Run`.

    Consecutive skipped steps share a row, and so do verdicts with the same
    message about several layers.

    Returns:
        List of dicts by rising step, with

        - `"key"`: a string that identifies the row;
        - `"events"`, `"steps"`: the indices and the steps of its events;
        - `"kind"`, `"level"`, `"noticed"`, `"wall_time"`: data of its first
          event;
        - `"title"`, `"text"`, `"details"`, `"layers"`: its content;
        - `"lane"`: the lane of its marks in the timeline, or `None`;
        - `"fixes"`: code that repairs the fault, by title.
    """
    places = {id(event): place for place, event in enumerate(run.events)}
    rows = [_row(group, places, run) for group in _groups(run.events)]
    return sorted(rows, key=lambda row: row["steps"][0])


def counts_by_kind(run) -> dict:
    """Returns the title of each kind of event in a `Run`, with a count.

    A skipped step counts once, even if several optimizers skip it.
    """
    counts = Counter(event["kind"] for event in run.events)
    listed = len({moment(event) for event in run.of_kind("skipped_step")})
    more = max(run.skipped - listed, 0)
    known = {"skipped_step": listed, "skipped_steps_not_kept": more}
    return {
        kind: {"title": _title_of_kind(kind), "count": known.get(kind, count)}
        for kind, count in counts.items()
    }


def title_of(event: Mapping) -> str:
    """Returns the title of an event."""
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
    """Returns the title of a finding with a symbol, and its level.

    Args:
        title: String.
        level: String, one of `LEVELS`.
        repaired: Boolean.
    """
    if repaired:
        return {"text": f"✓ {title}, repaired", "level": "fine"}
    return {"text": f"{_GLYPHS[level]} {title}", "level": level}


def words(name: str) -> str:
    """Returns a name from the log as words."""
    return str(name).replace("_", " ")


def _groups(events):
    groups, skips, verdicts = [], {}, {}
    for event in events:
        group = [event]
        if event["kind"] == "skipped_step":
            name = event.get("optimizer", "")
            # Each optimizer has its own rows, because two optimizers may skip
            # the same steps.
            before = skips.get(name)
            if before and _follows(event, before[-1]):
                before.append(event)
                continue
            skips[name] = group
        elif event["kind"] == "verdict":
            if first := verdicts.get(said_alike(event)):
                first.append(event)
                continue
            verdicts[said_alike(event)] = group
        groups.append(group)
    return groups


def _follows(event, before):
    # Steps with bad data do not share a row with other skipped steps.
    alike = bool(event.get("bad_input")) == bool(before.get("bad_input"))
    return alike and moment(event) == moment(before) + 1


def _row(group, places, run):
    event, kind = group[0], group[0]["kind"]
    try:
        said = _said(group, run)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        # Show damaged events and users' own events as JSON if they have no
        # sentence.
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


def _said(group, run):
    event, kind = group[0], group[0]["kind"]
    write, said = _WRITE.get(kind), EVENTS.get(kind, Event()).says
    if not (write or said):
        return _in_json(event)
    text = said.format_map(_Words(event)).rstrip()
    text = write(group, run) if write else text
    layers = [e["layer"] for e in group if e.get("layer")]
    fixes = fix_of(event, run.events, run.table).items()
    return {
        "title": title_of(event),
        "text": text,
        "details": [*_details(group)],
        "layers": layers or [*event.get("layers", {})],
        "fixes": {_FIXES.get(use, use): code for use, code in fixes},
    }


def in_sentences(*clauses: str) -> str:
    """Returns the non-empty clauses as sentences."""
    known = [text.rstrip(".") for text in clauses if text]
    return " ".join(f"{text[:1].upper()}{text[1:]}." for text in known)


def _in_json(event):
    known = ("kind", "step", "wall_time", "level")
    rest = {name: x for name, x in event.items() if name not in known}
    text = f"{event['kind']} {to_json(rest)}"
    about = {"title": words(event["kind"]), "text": text}
    return about | {"details": [], "layers": [], "fixes": {}}


class _Words(dict):
    """The fields of an event, formatted for a sentence."""

    def __init__(self, event):
        super().__init__({n: _value(n, x) for n, x in event.items()})
        name, layer, kind = map(event.get, ("optimizer", "layer", "kind"))
        self.setdefault("message", f"reports {words(kind)}")
        self["of"] = f" of {name}" if name else ""
        self["at"] = f"{layer}: " if layer else ""
        again = "; the step was repeated after the repair"
        self["again"] = again if event.get("repaired") else ""
        if "first_step" in event:
            ends = self["first_step"], self["last_step"]
            self["span"] = " between steps {} and {}".format(*ends)
        if isinstance(event.get("steps"), list):
            self["steps"] = format_count(len(event["steps"]), "step")
        if isinstance(event.get("counts"), dict):
            units = BATCHES if kind == "nonfinite_losses" else STEPS
            self["counts"] = format_kinds(event["counts"], units)

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
    """Returns a value of the log as a number, or `None` if it is not a number.

    Infinity and NaN are strings in the log.
    """
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _skipped(group, _):
    first, last = group[0], group[-1]
    of, why = _Words(first)["of"], _why_skipped(group)
    from_, to = (_value("scale", e.get("scale", "?")) for e in (first, last))
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
        rows = _rows(first["bad_input"])
        return (
            f"{which} not finite, first in {rows}. No loss scale and no dtype "
            "can repair bad data."
        )
    variables = dict.fromkeys(v for e in group for v in e.get("variables", []))
    where = f" in {format_names(map(str, variables), 2)}" if variables else ""
    found = [kind for e in group for kind in e.get("kinds", {}).values()]
    kinds = [kind if isinstance(kind, list) else [kind] for kind in found]
    seen = [*dict.fromkeys(str(one) for kind in kinds for one in kind)]
    listed = f" ({', '.join(seen)})" if seen else ""
    loss = ", ".join(map(str, first.get("loss", [])))
    said = f"gradients not finite{where}{listed}."
    if loss or not seen or any(kind == "nan" for kind in seen):
        return f"loss {loss}, {said}" if loss else said
    # A finite loss and infinite gradients mean that the scale was too high.
    return (
        f"{said} The loss scale was too high for these gradients. A dynamic "
        "loss scale falls after each such step until it fits, so a few skipped "
        "steps are harmless."
    )


def _rows(parts):
    if not isinstance(parts, dict):
        return ""
    found = (f"row {row} of the batch's {part}" for part, row in parts.items())
    return ", ".join(found)


def _verdict(group, _):
    event, numbers = group[0], group[0].get("numbers", {})
    since, way = event.get("failing_since"), event.get("direction")
    part = "update of weights" if way == "update" else f"{way} pass"
    about = (
        event["layer"],
        way and f"in the {part}",
        "code" in numbers and f"at {numbers['code']}",
        since is not None and f"failing since step {since:,}",
        "found_by" in numbers and f"found by {numbers['found_by']}",
    )
    at = ", ".join(filter(None, about))
    at = at if event["layer"] else at[:1].upper() + at[1:]
    # Name each layer once, because two calls to `fit` may both report a layer
    # at the step between them.
    _, *others = dict.fromkeys(e["layer"] for e in group)
    count = format_count(len(others), "more layer")
    named = format_names(others, _MOST_LAYERS)
    same = f" The same applies to {count}: {named}." if others else ""
    said = event["advice"] or words(event["verdict"])
    return f"{at}: {said}{same}" if at else f"{said}{same}"


# The least rise in the share of zeros that counts. A smaller rise may come from
# the batch alone.
_RISE = 0.01


def harm(event: dict, run) -> str:
    """Returns a clause about the harm of a low loss scale.

    The clause counts the layers that have more zero gradients than in any
    earlier reading, and names the worst layer. The clause is empty if no
    earlier reading exists.

    Args:
        event: Dict, an event of the run of kind `"loss_scale_low"`.
        run: `Run`.
    """
    try:
        grid = run.grid("gradient_zero", MAX_COLUMNS)
    except KeyError:
        return ""
    start = event.get("at_step", 0)
    since = (grid.last >= start) & (grid.last < _end(event, run))
    before = _most(grid, grid.last < start)
    after = _most(grid, since)
    rises = after - before
    known, worse = ~np.isnan(rises), rises > _RISE
    if np.isnan(before).all():
        return ""
    if not known.any():
        return "no gradients have been measured since then"
    if not worse.any():
        return "since then, no layer has had more zero gradients"
    row = np.nanargmax(rises)
    step = grid.last[since][np.nanargmax(grid.worst[row, since])]
    share, had = before[row], "have" if worse.sum() > 1 else "has"
    return (
        f"since then, {worse.sum():,} of {format_count(known.sum(), 'layer')} "
        f"{had} had more zero gradients, {grid.layers[row]} the most: "
        f"{format_share(share)} before, {format_share(after[row])} after step "
        f"{step:,}"
    )


def _most(grid, columns):
    """Returns the largest share of each layer in some columns."""
    return np.fmax.reduce(grid.worst[:, columns], axis=1, initial=np.nan)


def _end(event, run):
    """Returns the step at which the scale recovered, or infinity."""
    name = event.get("optimizer", "")
    back = (
        e["step"]
        for e in run.of_kind("loss_scale_recovered")
        if e.get("optimizer", "") == name and e["step"] > event["step"]
    )
    return next(back, math.inf)


def _advised(group, run):
    event = group[0]
    low = event["kind"] == "loss_scale_low"
    cost = harm(event, run) if low else ""
    return in_sentences(event["message"], cost, event.get("advice", ""))


_WRITE: dict[str, Callable] = {
    "skipped_step": _skipped,
    "verdict": _verdict,
    "loss_scale_low": _advised,
    "metric_not_finite": _advised,
    "validation_not_finite": _advised,
}


# Titles for numbers in verdicts. All other numbers keep their names.
_NUMBERS = {
    "operation": "operation",
    "error": "error against float32",
    "largest_inside_in_float32": "largest number inside the layer, in float32 "
    "(float16 overflows above 65,504)",
    "smallest_inside_in_float32": "smallest nonzero number inside the layer, "
    "in float32 (float16 underflows below 6e-08)",
    "overflows_in_steps": "steps until an overflow is expected",
    "loss_scale_bits": "loss scale",
    "headroom_bits": "bits of headroom",
}
# The names of numbers that the sentence of an event already tells.
_SAID = ("code", "found_by", "epoch", "batch", "batches")


def _details(group) -> Iterator[str]:
    event = group[0]
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


def _numbers(verdict):
    for name, value in verdict.get("numbers", {}).items():
        if name in _SAID:
            continue
        number, stem = _number(value), name.removesuffix("_bits")
        title = words(name) if stem == name else f"{words(stem)} loss scale"
        if number is None:
            listed = value if isinstance(value, list) else [value]
            text = ", ".join(map(str, listed))
        elif stem not in (name, "headroom"):
            text = format_power(2.0**number)
        else:
            text = _value(name, value)
        # Numbers of bad samples count from the start of the whole array. Row
        # numbers of a skipped step count from the start of its batch.
        is_all = name.startswith("samples_of_")
        of = ", counted from 0 in the whole array" if is_all else ""
        yield f"{_NUMBERS.get(name, title)}{of}: {text}"
