"""What events say of layers and loss scales, and what a sentence is made of.

People may log events of their own, other versions of this package have others,
and a log may be damaged: what has another form is left out.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from keras_mixprec.reporting.event_kinds import EVENTS
from keras_mixprec.reporting.schema import PRECISION_CHANGES
from keras_mixprec.verdict_kinds import KINDS, Kind

# What a tuner does to the loss scale, and how it is told.
SCALE_CHANGES = {"raise_scale": "raised", "lower_scale": "lowered"}

# What a log says of the run as a whole.
STORY = frozenset(kind for kind, event in EVENTS.items() if event.is_story)

# Where what is beyond 16 bits is no matter.
WIDE = ("float32", "float64")

# What a layer computes in that is in float16 on inputs times a power of two.
_RESCALED = "rescaled float16"

# The gravest first.
LEVELS = ("bad", "warning", "info")


def kind_of(name: str) -> Kind:
    """Returns a kind of verdict; one that is not known is bad."""
    return KINDS.get(name) or Kind(name, "")


def moment(event: Mapping) -> int:
    """Returns the step at which something was, not when it was noticed.

    How far a loss scale fell is of the reading that says so.
    """
    if event["kind"] == "loss_scale_low":
        return event["step"]
    return event.get("at_step", event.get("first_step", event["step"]))


def dtype_of(policy: str) -> str:
    """Returns what a policy computes in, as `dtype_now` has it."""
    if policy.startswith("rescaled("):
        return _RESCALED
    return policy.removeprefix("mixed_")


def dtype_now(layer: Mapping) -> str:
    """Returns what a layer computes in, a row of the table of layers."""
    return _RESCALED if layer.get("rescaled") else layer["compute_dtype"]


def changes_of(events: Iterable, *kinds: str) -> dict:
    """Returns the last change of each layer's policy, by path.

    Args:
        events: Dicts, by rising step.
        *kinds: Strings, which changes count. All without any.

    Returns:
        Dict from paths to pairs of an event and the dtype since.
    """
    return {
        path: (event, dtype_of(change["after"]))
        for event in events
        if event["kind"] in (kinds or PRECISION_CHANGES)
        and not event.get("dry_run")
        for path, change in event["layers"].items()
    }


def dtypes_now(events: Iterable, layers: list) -> dict:
    """Returns what each layer computes in, by path.

    Args:
        events: Dicts, by rising step: the table of layers has no row of the
            model itself, whose own code may have been at fault.
        layers: List of dicts, the table of layers.
    """
    changed = {p: dtype for p, (_, dtype) in changes_of(events).items()}
    return changed | {layer["path"]: dtype_now(layer) for layer in layers}


def is_repaired(kind: str, dtype: str | None) -> bool:
    """Whether a layer computes by now in what such a finding asks for.

    Args:
        kind: String. The kind of a verdict.
        dtype: String, as `dtype_now` returns it, or `None` if not known.
    """
    repairs = kind_of(kind).repaired_by
    fits = "mixed_bfloat16" in repairs and dtype in ("bfloat16", _RESCALED)
    return bool(repairs) and (fits or dtype in WIDE)


def dtype_at(layer: Mapping, step: int) -> str:
    """Returns what a layer computed in at a step.

    A change made after a step is of the steps behind it.

    Args:
        layer: Dict, a row of the table of layers.
        step: Int.
    """
    before = [dtype for since, dtype in layer["dtypes"] if since < step]
    return before[-1] if before else layer["dtypes"][0][1]


def asks_for_scale(verdict: Mapping) -> bool:
    """Whether another loss scale cures what a verdict says."""
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
    """Returns how grave an event is: the one place that decides it.

    Returns:
        One of `LEVELS`, or `"demote"`, `"promote"` or `"skip"`.
    """
    kind = event["kind"]
    # Neither what is over nor what somebody wanted.
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
    """Whether a divergence is one of training, and not of one batch alone.

    That says what of the batch is not finite, or nothing.
    """
    numbers = verdict.get("numbers", {})
    return bool(numbers) and "not_finite" not in numbers


def still_said(events: Iterable, said: str, over: str) -> dict:
    """Returns the last event of a kind by optimizer, unless another ends it.

    Args:
        events: Dicts, by rising step.
        said: String, a kind of event.
        over: String, the kind that says that it is no longer so.
    """
    found: dict = {}
    for event in events:
        name = event.get("optimizer", "")
        if event["kind"] == said:
            found[name] = event
        elif event["kind"] == over:
            found.pop(name, None)
    return found


def low_scales(events: Iterable) -> list[dict]:
    """Returns what says of loss scales that they are low, as of the end."""
    found = still_said(events, "loss_scale_low", "loss_scale_recovered")
    return [*found.values()]


class Facts(NamedTuple):
    """What the sentence is made of.

    Attributes:
        events: List of dicts, the events of the last `fit` by rising step,
            behind those of earlier ones that still hold. Only those of a kind
            in `STORY` count.
        layers: List of dicts with `"path"`, `"compute_dtype"`,
            `"share_of_flops"` and `"parameters"`, as they are now.
        steps: Int. Steps of the last `fit`.
        skipped: Dict from the name of each loss scale optimizer, `""` for an
            only one, to the steps that it skipped.
        in_a_row: Int. Steps skipped since the last one applied.
        measured: Boolean. Whether the range of any layer is known.
        fits: Int. How many calls of `fit` the log has. Defaults to `1`.
        first: Int. The first step of the last, as the log counts. Defaults to
            `1`.
        examined: Boolean. Whether any layer was compared with float32.
            Defaults to `False`.
        flat_loss: String. That the loss did not fall, in a sentence. Defaults
            to `""`: it did.
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
    """Returns the facts of the last `fit` in a log, a `Run`."""
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
    """What was found in earlier fits of layers that are repaired by now."""
    now = dtypes_now(run.events, run.layers)
    repaired = [
        event
        for event in events
        if event["kind"] == "verdict"
        and is_repaired(event["verdict"], now.get(event["layer"]))
    ]
    # Without a finding, nothing is said of what was done about it.
    kinds = {*PRECISION_CHANGES} - {"undo"} if repaired else ()
    return repaired + [event for event in events if event["kind"] in kinds]


def growth(counts: list) -> int:
    """Returns by how much a count rose, where it may begin again from 0.

    An optimizer that counts from 0 again was made for another run.
    """
    pairs = zip(counts, counts[1:], strict=False)
    return sum(now - old if now >= old else now for old, now in pairs)


def _skipped_since(first, course):
    rows = list(zip(course["steps"], course["skipped"], strict=True))
    counts = [count for step, count in rows if step <= first][-1:] or [0]
    return growth(counts + [count for step, count in rows if step > first])


def last_of_falls(events: list) -> list:
    """Returns events with the last one alone of each fall of a loss scale.

    Each reading says again how far it fell since the step at which it began.
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
    # A run that goes on, or was killed: what is known of single steps.
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
            # Unless an applied one is between.
            if event["count"] == ends[1] - ends[0]:
                skipped |= {*range(*ends)}
    return skipped
