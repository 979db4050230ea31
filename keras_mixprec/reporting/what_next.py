"""What a tuner did in a run, and what is left to do, in a sentence each."""

from collections.abc import Mapping

from keras_mixprec.formats import format_count, format_moment, format_power
from keras_mixprec.reporting.facts import (
    dtype_now,
    dtype_of,
    is_repaired,
    low_scales,
)
from keras_mixprec.verdict_kinds import KINDS

# Why nothing is changed although something was found.
_NO_REPAIR = {
    "bad_data": "the batches were at fault, not the layers",
    "divergence": "float32 fails as well",
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
    would = any(event.get("dry_run") for event in own)
    done = [
        text for kind, told in _DONE.items() if (text := told(_of(own, kind)))
    ]
    if done:
        return f"The tuner {', and '.join(done)}."
    if would:
        return "The tuner changed nothing: it only advises (dry_run=True)."
    kept = any(event["kind"] == "loss_scale_kept" for event in own)
    scale = "; the loss scale that they lowered is restored" if kept else ""
    return f"The tuner watched and changed nothing{_why_nothing(own)}{scale}."


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
    now = {layer["path"]: dtype_now(layer) for layer in overview["layers"]}
    paths = dict.fromkeys(
        event["layer"]
        for event in events
        if event["kind"] == "verdict"
        and event["layer"] in now
        and event["verdict"] in KINDS
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


def _raised(events):
    if not events or "after" not in events[-1]:
        return None
    scale = format_power(events[-1]["after"])
    return f"raised the loss scale to {scale} at step {events[-1]['step']:,}"


def _undone(events):
    return "undid a demotion that made training diverge" if events else None


def _gave_up(events):
    return "gave up" if events else None


_DONE = {
    "demote": _moved,
    "promote": _returned,
    "shrink": _returned,
    "undo": _undone,
    "raise_scale": _raised,
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


_NEXT_RUN = (
    "Nothing is left to do in this run. The next one starts without the repair"
)


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
    if event["verdict"] == "scale_too_low":
        text = f"{_NEXT_RUN}, unless its loss scale starts higher."
        return {"text": text, "code": fix.get("training")}
    now = {layer["path"]: dtype_now(layer) for layer in overview["layers"]}
    if not is_repaired(event["verdict"], now.get(event["layer"])):
        text = "Nothing is left to do: the layer is back in 16 bits."
        return {"text": text, "code": None}
    bits = event.get("numbers", {}).get("advised_bits")
    if bits is not None:
        text = (
            "What to do: start the next run with a loss scale of "
            f"{format_power(2.0**bits)}, at which {event['layer']} needs no "
            "float32. This one was repaired without it."
        )
        return {"text": text, "code": None}
    return {
        "text": f"{_NEXT_RUN}, unless it is given a PrecisionRule for what was "
        "demoted, or PrecisionTuner(plan='plan.json'), which writes its "
        "repairs to that file and begins with them the next time.",
        "code": fix.get("plan"),
    }


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
