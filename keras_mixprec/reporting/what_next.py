"""What a tuner did in a run, and what is left to do, in a sentence each."""

from collections.abc import Mapping

from keras_mixprec.formats import format_count, format_moment, format_power
from keras_mixprec.reporting.facts import (
    SCALE_CHANGES,
    asks_for_scale,
    dtype_of,
    dtypes_now,
    is_repaired,
    low_scales,
)
from keras_mixprec.reporting.flat_loss import (
    is_known_since_repair,
    standing_loss,
)
from keras_mixprec.verdict_kinds import KINDS

# Why nothing is changed although something was found.
_NO_REPAIR = {
    "bad_data": "the batches were at fault, not the layers",
    "divergence": "float32 fails as well",
    "loss_scale_ignored": "the code around the optimizer was at fault",
    "weights_lost": "no dtype brings weights back",
    "scale_search": "no layer was at fault",
}


def tuner_did(events: list) -> str | None:
    """Returns what a tuner did in the last `fit`; `None` if there was none.

    Args:
        events: List of dicts, by rising step.

    Example:
    >>> from keras_mixprec.reporting.what_next import tuner_did
    >>> tuner_did([{"kind": "train_begin", "step": 0, "tuner": True}])
    'The tuner watched and changed nothing: no layer was at fault.'
    """
    begins = [n for n, e in enumerate(events) if e["kind"] == "train_begin"]
    if not begins or not events[begins[-1]].get("tuner"):
        return None
    own = events[begins[-1] :]
    who = "The tuner"
    if len(begins) > 1:
        who = f"In the last of {len(begins)} fits the tuner"
    would = any(event.get("dry_run") for event in own)
    done = [
        text for kind, told in _DONE.items() if (text := told(_of(own, kind)))
    ]
    if done:
        return f"{who} {', and '.join(done)}."
    if would:
        return f"{who} changed nothing: it only advises (dry_run=True)."
    kept = any(event["kind"] == "loss_scale_kept" for event in own)
    scale = "; the loss scale that they lowered is restored" if kept else ""
    return f"{who} watched and changed nothing{_why_nothing(own)}{scale}."


def tuner_would(overview: Mapping) -> str | None:
    """Returns that no tuner was there, and what one would have done.

    Args:
        overview: Dict, as `RunData.overview` returns it.

    Returns:
        String; `None` where there was one, or none would have helped.
    """
    events = overview["events"]
    begins = [e for e in events if e["kind"] == "train_begin"]
    if not begins or begins[-1].get("tuner", True):
        return None
    now = dtypes_now(events, overview["layers"])
    paths = dict.fromkeys(
        event["layer"]
        for event in events
        if event["kind"] == "verdict"
        and event["layer"] in now
        and event["verdict"] in KINDS
        and not asks_for_scale(event)
        and KINDS[event["verdict"]].repaired_by
        and not is_repaired(event["verdict"], now[event["layer"]])
    )
    would = []
    if paths:
        first, *others = paths
        more = f" and {format_count(len(others), 'more layer')}" * bool(others)
        would.append(f"repair {first}{more}")
    if _lowered_by_data(events):
        would.append("restore the loss scale that bad data lowered")
    if not would:
        return None
    return (
        f"No tuner in this run: PrecisionTuner() would {' and '.join(would)}."
    )


def _lowered_by_data(events):
    """What says of loss scales that bad data, to be dropped, keep them low."""
    return [e for e in low_scales(events) if e.get("cause") == "bad_data"]


def _of(events, kind):
    return [e for e in events if e["kind"] == kind and not e.get("dry_run")]


def _moved(events):
    changes = {p: c for event in events for p, c in event["layers"].items()}
    if not changes:
        return None
    dtypes = sorted({dtype_of(c["after"]) for c in changes.values()})
    steps = sorted({event["step"] for event in events})
    at = format_moment(steps[0])
    if steps[1:]:
        at = f"from step {steps[0]:,} to step {steps[-1]:,}"
    moved = format_count(len(changes), "layer")
    return f"demoted {moved} to {' and '.join(dtypes)} {at}"


def _returned(events):
    paths = {path for event in events for path in event["layers"]}
    count = format_count(len(paths), "layer")
    return f"returned {count} to 16 bits" if paths else None


def _scale_set(events):
    if not events or "after" not in events[-1]:
        return None
    scale, kind = format_power(events[-1]["after"]), events[-1]["kind"]
    done = SCALE_CHANGES[kind]
    return f"{done} the loss scale to {scale} at step {events[-1]['step']:,}"


def _advised(events):
    if not events or "after" not in events[-1]:
        return None
    scale = format_power(events[-1]["after"])
    return f"changed nothing for want of a loss scale of {scale}"


def _undone(events):
    return "undid a demotion that made training diverge" if events else None


def _gave_up(events):
    return "gave up" if events else None


_DONE = {
    "demote": _moved,
    "promote": _returned,
    "shrink": _returned,
    "undo": _undone,
    "raise_scale": _scale_set,
    "lower_scale": _scale_set,
    "advise_scale": _advised,
    "give_up": _gave_up,
}


def _why_nothing(events):
    kinds = [e["verdict"] for e in events if e["kind"] == "verdict"]
    if not kinds:
        return ": no layer was at fault"
    # What is left of those that it repairs has reasons of its own.
    if any(KINDS[kind].repaired_by for kind in kinds if kind in KINDS):
        return ""
    known = [_NO_REPAIR[kind] for kind in kinds if kind in _NO_REPAIR]
    return f": {known[0]}" if known else ""


def what_next(overview: Mapping) -> dict | None:
    """Returns what is left to do about the main finding of a run.

    Args:
        overview: Dict, as `RunData.overview` returns it, with `"finding"`.

    Returns:
        Dict with `"text"`, a sentence or two, and `"code"`, what is to be
        copied for that, `None` if there is none. `None` where nothing was
        found.
    """
    finding = overview["finding"]
    if finding is None:
        return None
    event = overview["events"][finding["event"]]
    fix = event.get("fix", {})
    if not finding["repaired"]:
        if not event.get("advice"):
            return None
        code = next(
            (fix[use] for use in ("training", "data") if use in fix), None
        )
        text = f"What to do: {event['advice']}"
        if same := _say_the_same(overview["events"], event):
            text += f" The same in {format_count(same, 'more layer')}."
        if event.get("verdict") == "bad_data":
            return _with_scale({"text": text, "code": code}, overview["events"])
        return {"text": text, "code": code}
    done = _done(overview, "Nothing else is left to do.")
    if asks_for_scale(event):
        text = (
            "Start the next run with that loss scale, or it starts without the "
            f"repair. {done}"
        )
        return {"text": text, "code": fix.get("training")}
    now = dtypes_now(overview["events"], overview["layers"])
    if not is_repaired(event["verdict"], now.get(event["layer"])):
        return {"text": f"{done} The layer is back in 16 bits.", "code": None}
    if plan := _plan_with(event["layer"], overview["events"]):
        done = _done(overview, "Every finding of this run is repaired.")
        text = (
            f"{done} The next run starts with the repair in place, from {plan}."
        )
        return {"text": text, "code": None}
    return {
        "text": "The repair is not saved. With "
        "PrecisionTuner(plan='plan.json') a run writes its repairs to that "
        "file, and the next run starts from them. You can also give the layers "
        f"a PrecisionRule. {done}",
        "code": fix.get("plan"),
    }


def _done(overview, nothing):
    """Whether anything is left to do in a run whose finding is repaired."""
    stands = standing_loss(overview)
    if not is_known_since_repair(overview):
        return (
            "What was found is repaired, and no loss is known from after the "
            "repair: train on to see that it falls."
        )
    if stands is None:
        return nothing
    return (
        f"What was found is repaired. {stands} Look for another cause, such as "
        "the learning rate or the data."
    )


def _plan_with(layer, events):
    """The file that has the demotion of a layer, `None` if there is none."""
    own = [
        e for e in events if layer in e.get("layers", {}) and "plan_file" in e
    ]
    failed = [e for e in events if e["kind"] == "plan_not_written"]
    if not own or failed and failed[-1]["step"] >= own[-1]["step"]:
        return None
    return own[-1]["plan_file"]


def _with_scale(found, events):
    """What to do about bad data, and about the loss scale that they lowered."""
    lowered = _lowered_by_data(events)
    calls = [e["fix"]["training"] for e in lowered if "fix" in e]
    if not calls:
        return found
    then = "".join(calls)
    return {
        "text": f"{found['text']} Then restore the loss scale that they "
        f"lowered: {', '.join(then.split())}.",
        "code": f"{found['code'] or ''}{then}",
    }


def _say_the_same(events, verdict):
    """How many verdicts there are beside one that say the same of others."""
    about = ("verdict", "step", "direction")
    return sum(
        event.get("same_as", "") == verdict.get("layer")
        and all(event[name] == verdict[name] for name in about)
        for event in events
    )
