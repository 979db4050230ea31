"""Facts of a run: dtypes of layers, loss scales, and the levels of events."""

import collections
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from keras_mixprec.reporting.event_kinds import EVENTS
from keras_mixprec.reporting.schema import PRECISION_CHANGES
from keras_mixprec.verdict_kinds import KINDS, Kind, what_is_said

# Tuner events that change the loss scale, with a verb for each kind of event.
SCALE_CHANGES = {"raise_scale": "raised", "lower_scale": "lowered"}

# The kinds of events that the headline uses.
STORY = frozenset(kind for kind, event in EVENTS.items() if event.is_story)

# Dtypes in which numbers beyond the float16 range are harmless.
WIDE = ("float32", "float64")

# The name for float16 with inputs that are multiplied by a power of two.
_RESCALED = "rescaled float16"

# The levels of findings, the most severe first.
LEVELS = ("bad", "warning", "info")


def kind_of(name: str) -> Kind:
    """Returns a kind of verdict. Unknown kinds count as bad."""
    return KINDS.get(name) or Kind(name, "")


def moment(event: Mapping) -> int:
    """Returns the step at which an event happened, which may be noticed later.

    For a low loss scale, returns the step of the reading that found the fall.
    """
    if event["kind"] == "loss_scale_low":
        return event["step"]
    return event.get("at_step", event.get("first_step", event["step"]))


def dtype_of(policy: str) -> str:
    """Returns the compute dtype of a policy, named as in `dtype_now`."""
    if policy.startswith("rescaled("):
        return _RESCALED
    return policy.removeprefix("mixed_")


def dtype_now(layer: Mapping) -> str:
    """Returns the compute dtype of a layer, given its row in the table."""
    return _RESCALED if layer.get("rescaled") else layer["compute_dtype"]


def all_changes(events: Iterable, *kinds: str) -> dict[str, list]:
    """Returns the changes of each layer's policy, by path.

    Args:
        events: Dicts, by rising step.
        *kinds: Strings, the kinds of changes that count. Defaults to all.

    Returns:
        Dict from paths to lists of pairs: an event, and the dtype after it.
    """
    found: dict = collections.defaultdict(list)
    for event in events:
        if event["kind"] in (kinds or PRECISION_CHANGES):
            for path, change in event["layers"].items():
                if not event.get("dry_run"):
                    found[path].append((event, dtype_of(change["after"])))
    return found


def changes_of(events: Iterable, *kinds: str) -> dict:
    """Returns the last change of each layer, as a pair as in `all_changes`."""
    return {p: own[-1] for p, own in all_changes(events, *kinds).items()}


def dtypes_now(events: Iterable, layers: list) -> dict:
    """Returns the dtype that each layer computes in, by path.

    Args:
        events: Dicts, by rising step. They may also name the model itself,
            which has no row in the table of layers.
        layers: List of dicts, the table of layers.
    """
    changed = {p: dtype for p, (_, dtype) in changes_of(events).items()}
    return changed | {layer["path"]: dtype_now(layer) for layer in layers}


def is_repaired(kind: str, dtype: str | None) -> bool:
    """Returns whether a layer's dtype repairs a finding.

    Args:
        kind: String. The kind of a verdict.
        dtype: String from `dtype_now`, or `None` if not known.
    """
    repairs = kind_of(kind).repaired_by
    fits = "mixed_bfloat16" in repairs and dtype in ("bfloat16", _RESCALED)
    return bool(repairs) and (fits or dtype in WIDE)


def dtype_at(layer: Mapping, step: int) -> str:
    """Returns the dtype of a layer at a step.

    A change at a step takes effect at the next step.

    Args:
        layer: Dict, a row of the table of layers.
        step: Int.
    """
    before = [dtype for since, dtype in layer["dtypes"] if since < step]
    return before[-1] if before else layer["dtypes"][0][1]


def asks_for_scale(verdict: Mapping) -> bool:
    """Returns whether a different loss scale repairs the fault."""
    advised = "advised_bits" in verdict.get("numbers", {})
    return advised or verdict.get("verdict") == "scale_too_low"


def scale_set(verdict: Mapping, events: Iterable) -> dict | None:
    """Returns the last event that set the loss scale for a verdict, if any."""
    found = [
        event
        for event in events
        if event["kind"] in SCALE_CHANGES
        and not event.get("dry_run")
        and event["step"] >= verdict["step"]
    ]
    return found[-1] if found and asks_for_scale(verdict) else None


def level_of(event: Mapping) -> str:
    """Returns how severe an event is.

    Returns:
        One of `LEVELS`, or `"demote"`, `"promote"` or `"skip"`.
    """
    kind = event["kind"]
    # Dry runs, repaired faults and the user's interruptions need no attention.
    if any(event.get(x) for x in ("dry_run", "repaired", "interrupted")):
        return "info"
    if kind == "verdict":
        return kind_of(event.get("verdict", "")).level
    if kind == "before_training":
        level = event.get("level", "info")
        return level if level in LEVELS else "info"
    if event.get("within") is False:
        return "warning"
    return EVENTS[kind].level if kind in EVENTS else "info"


def has_diverged(verdict: Mapping) -> bool:
    """Returns whether training diverged, as opposed to one failed batch."""
    numbers = verdict.get("numbers", {})
    return bool(numbers) and "not_finite" not in numbers


def still_said(events: Iterable, said: str, over: str) -> dict:
    """Returns each optimizer's last event of a kind, if it still holds.

    Args:
        events: Dicts, by rising step.
        said: String. A kind of event.
        over: String. The kind of event after which `said` no longer holds.
    """
    found: dict = {}
    for event in events:
        name = event.get("optimizer", "")
        if event["kind"] == said:
            found[name] = event
        elif event["kind"] == over:
            found.pop(name, None)
    return found


def said_alike(verdict: Mapping) -> tuple:
    """Returns a key that verdicts with the same message share."""
    kind, layer, way = map(verdict.get, ("verdict", "layer", "direction"))
    said = what_is_said(str(kind), layer, way, verdict.get("advice", ""))
    return verdict["step"], *said


def low_scales(events: Iterable) -> list[dict]:
    """Returns the events about loss scales that are low at the end."""
    found = still_said(events, "loss_scale_low", "loss_scale_recovered")
    return [*found.values()]


class Facts(NamedTuple):
    """The facts behind the headline of a run.

    Attributes:
        events: List of dicts: earlier events that still hold, then the events
            of the last `fit` by rising step. Only kinds in `STORY` count.
        layers: List of dicts with `"path"`, `"compute_dtype"`,
            `"share_of_flops"` and `"parameters"`, in their current state.
        steps: Int. Steps of the last `fit`.
        skipped: Dict from the name of each loss scale optimizer to the number
            of steps that it skipped. A single optimizer has the name `""`.
        in_a_row: Int. Steps skipped since the last applied step.
        measured: Boolean. True if the range of any layer is known.
        fits: Int. The number of `fit` calls in the log. Defaults to `1`.
        first: Int. The first step of the last `fit`. Defaults to `1`.
        examined: Boolean. True if any layer was compared with float32.
            Defaults to `False`.
        flat_loss: String. A sentence if the loss did not fall. Defaults to
            `""`.
    """

    events: list
    layers: list
    steps: int
    skipped: dict
    in_a_row: int
    measured: bool
    fits: int = 1
    first: int = 1
    examined: bool = False
    flat_loss: str = ""


def facts_of(run) -> Facts:
    """Returns the facts about the last `fit` of a `Run`."""
    events, begins = run.events, run.begins
    start = events.index(begins[-1]) if begins else 0
    before, events = events[:start], events[start:]
    first = events[0]["step"] if before else 0
    return Facts(
        _still_true(before, run) + events,
        [*run.layers],
        run.last_step - first,
        {x["optimizer"]: _skipped_since(first, x) for x in run.scale},
        _in_a_row(events, run.last_step),
        any(layer["least_headroom"] is not None for layer in run.layers),
        max(len(begins), 1),
        first + 1,
        any(metric["kind"] == "error" for metric in run.metrics),
    )


def _still_true(events, run):
    """Returns earlier verdicts that are repaired now, and their repairs."""
    now = dtypes_now(run.events, run.layers)
    repaired = [
        event
        for event in events
        if event["kind"] == "verdict"
        and is_repaired(event["verdict"], now.get(event["layer"]))
    ]
    # The headline mentions a change only together with its finding.
    kinds = {*PRECISION_CHANGES} - {"undo"} if repaired else ()
    return repaired + [event for event in events if event["kind"] in kinds]


def growth(counts: list) -> int:
    """Returns the total rise of a count that new optimizers restart at 0."""
    pairs = zip(counts, counts[1:], strict=False)
    return sum(now - old if now >= old else now for old, now in pairs)


def _skipped_since(first, course):
    rows = list(zip(course["steps"], course["skipped"], strict=True))
    counts = [count for step, count in rows if step <= first][-1:] or [0]
    return growth(counts + [count for step, count in rows if step > first])


def last_of_falls(events: list) -> list:
    """Removes all but the last report of each fall of a loss scale.

    Each reading during a fall reports the whole fall again.
    """

    def fall(event):
        low = event["kind"] == "loss_scale_low" and "at_step" in event
        return (event.get("optimizer"), event["at_step"]) if low else id(event)

    last = {fall(event): event for event in events}
    return [event for event in events if last[fall(event)] is event]


def _in_a_row(events, last_step):
    ends = [e for e in events if e["kind"] == "train_end"]
    if ends and isinstance(ends[-1].get("in_a_row"), int):
        return ends[-1]["in_a_row"]
    # The run has no final summary, because it is still going or was killed.
    # Count the skipped steps at its end.
    skipped, count = _skipped_steps(events), 0
    while last_step - count in skipped:
        count += 1
    return count


def _skipped_steps(events):
    skipped = set()
    for event in events:
        if event["kind"] == "skipped_step" and "at_step" in event:
            skipped.add(event["at_step"])
        elif event["kind"] == "skipped_steps_not_kept":
            ends = event.get("first_step", 0), event.get("last_step", -1) + 1
            # If the numbers differ, some steps in between were applied.
            if event["count"] == ends[1] - ends[0]:
                skipped |= {*range(*ends)}
    return skipped
