"""What to do next, and what the tuner did apart from demotions."""

from collections.abc import Iterable, Mapping

from keras_mixprec.formats import format_count, format_names, format_power
from keras_mixprec.reporting.facts import (
    asks_for_scale,
    dtypes_now,
    is_repaired,
    kind_of,
    low_scales,
)
from keras_mixprec.reporting.fixes import fix_of
from keras_mixprec.reporting.flat_loss import standing_loss
from keras_mixprec.reporting.headline import over_by
from keras_mixprec.reporting.told import said_alike

# Why the tuner does not repair a finding.
_NO_REPAIR = {
    "bad_data": "the batches were at fault, not the layers",
    "divergence": "float32 fails as well",
    "loss_mismatch": "the loss does not suit the model",
    "unreachable_targets": "outputs cannot reach the targets",
    "not_learning": "float32 does not learn either",
    "loss_scale_ignored": "the code around the optimizer was at fault",
    "weights_lost": "no dtype brings weights back",
    "scale_search": "no layer was at fault",
}


def tuner_did(events: list, layers: list) -> str:
    """Returns what a tuner did in the last `fit`, or would have done.

    The sentence about the run has its demotions and findings.

    Args:
        events: List of dicts, by rising step.
        layers: List of dicts, the table of layers.

    Example:
    >>> from keras_mixprec.reporting.what_next import tuner_did
    >>> tuner_did([{"kind": "train_begin", "step": 0, "tuner": True}], [])
    'It watched and changed nothing: no layer was at fault.'
    """
    begins = [n for n, e in enumerate(events) if e["kind"] == "train_begin"]
    if not begins:
        return ""
    own = events[begins[-1] :]
    if not own[0].get("tuner", True):
        return _would(events, layers)
    if not own[0].get("tuner"):
        return ""
    who = f"In the last of {len(begins)} fits it" if begins[1:] else "It"
    done = [event for event in own if not event.get("dry_run")]
    texts = (_SAYS[e["kind"]](e) for e in done if e["kind"] in _SAYS)
    if said := dict.fromkeys(filter(None, texts)):
        return f"{who} {', and '.join(said)}."
    if done != own or any(event["kind"] in _TOLD for event in done):
        return ""
    kept = any(event["kind"] == "loss_scale_kept" for event in own)
    scale = "; the loss scale that they lowered is restored" if kept else ""
    return f"{who} watched and changed nothing{_why_nothing(own)}{scale}."


def _would(events, layers):
    """What a tuner would have done; empty if nothing."""
    now, is_over = dtypes_now(events, layers), over_by(events, layers)
    paths = dict.fromkeys(
        event["layer"]
        for event in events
        if event["kind"] == "verdict"
        and event["layer"] in now
        and kind_of(event["verdict"]).repaired_by
        and not (asks_for_scale(event) or is_over(event))
    )
    would = []
    if paths:
        would.append(f"repair {format_names(paths, 1, 'layer')}")
    if _lowered_by_data(events):
        would.append("restore the loss scale that bad data lowered")
    said = " and ".join(would)
    return f"PrecisionTuner() would {said}." if would else ""


def _lowered_by_data(events):
    """The events of loss scales that bad data lowered."""
    return [e for e in low_scales(events) if e.get("cause") == "bad_data"]


def _returned(event):
    return f"returned {format_names(event['layers'], 2, 'layer')} to 16 bits"


def _scale(verb):
    def said(event):
        if "after" not in event:
            return ""
        scale = format_power(event["after"])
        return f"{verb} {scale} at step {event['step']:,}"

    return said


_SAYS = {
    "promote": _returned,
    "shrink": _returned,
    "advise_scale": _scale("changed nothing for want of a loss scale of"),
    "raise_scale": _scale("raised the loss scale to"),
    "lower_scale": _scale("lowered the loss scale to"),
}
# The sentence about the run has these.
_TOLD = ("demote", "undo", "give_up")


def _why_nothing(events):
    kinds = [e["verdict"] for e in events if e["kind"] == "verdict"]
    if not kinds:
        return ": no layer was at fault"
    # Repairable findings that remain have other reasons.
    if any(kind_of(kind).repaired_by for kind in kinds):
        return ""
    known = [_NO_REPAIR[kind] for kind in kinds if kind in _NO_REPAIR]
    return f": {known[0]}" if known else ""


def what_next(
    finding: Mapping | None,
    events: list,
    layers: list,
    course: Mapping | None = None,
) -> dict | None:
    """Returns what the user should do about the main finding of a run.

    Args:
        finding: Dict from `main_finding`.
        events: List of dicts, by rising step.
        layers: List of dicts, the table of layers.
        course: Dict, the loss by step. Defaults to `None`.

    Returns:
        Dict with `"text"`, a sentence or two, and `"code"` for it, which may be
        empty. `None` if there is nothing to do.
    """
    if finding is None:
        return None
    event = finding["event"]
    fix = fix_of(event, events, layers)
    if finding["repaired"]:
        return _after_repair(event, fix, events, layers, course)
    code = next(
        (fix[x] for x in ("training", "data", "diagnosis") if x in fix), ""
    )
    text = event.get("advice") or "This code finds the cause." * bool(code)
    if not text:
        return None
    if event["kind"] == "verdict":
        alike = [v for v in events if v["kind"] == "verdict"]
        alike = [v for v in alike if said_alike(v) == said_alike(event)]
        if alike[1:]:
            more = format_count(len(alike) - 1, "more layer")
            text += f" The same in {more}."
    is_data = event.get("verdict") == "bad_data"
    lowered = _lowered_by_data(events) if is_data else []
    calls = [fix_of(e, events, layers).get("training", "") for e in lowered]
    if then := "".join(calls):
        call = ", ".join(then.split())
        text += f" Then restore the loss scale that they lowered: {call}."
    return {"text": text, "code": code + then}


def _after_repair(event, fix, events, layers, course):
    done = _whether_done(event, events, course)
    if asks_for_scale(event):
        text = "Start the next run with that loss scale, or it is not repaired."
        return {"text": f"{text}{done}", "code": fix.get("training", "")}
    now = dtypes_now(events, layers)
    if not is_repaired(event["verdict"], now.get(event["layer"])):
        return {"text": done.strip(), "code": ""} if done else None
    if plan := _plan_with(event["layer"], events):
        text = f"The next run starts with the repair in place, from {plan}."
        return {"text": f"{text}{done}", "code": ""}
    return {
        "text": "The repair is not saved. PrecisionTuner(plan='plan.json') "
        f"saves it for the next run.{done}",
        "code": fix.get("plan", ""),
    }


def _whether_done(event, events, course):
    """A sentence if the loss has not fallen since a repair."""
    stands = standing_loss(course, events)
    if stands is None:
        return ""
    if not stands:
        return " No loss is known since the repair, so train on to see it fall."
    return (
        f" {stands} Look for another cause, such as the learning rate or the "
        "data."
    )


def _plan_with(layer, events: Iterable):
    """The plan file with the demotion of a layer, or `None`."""
    own = [
        e for e in events if layer in e.get("layers", {}) and "plan_file" in e
    ]
    failed = [e for e in events if e["kind"] == "plan_not_written"]
    if not own or (failed and failed[-1]["step"] >= own[-1]["step"]):
        return None
    return own[-1]["plan_file"]
