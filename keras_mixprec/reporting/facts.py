"""Facts taken from a log's events, for the headline.

People may log events of their own, other versions of this package have others,
and a log may be damaged: what has another form is left out.
"""

from collections.abc import Mapping
from typing import NamedTuple

from keras_mixprec.reporting.event_kinds import EVENTS
from keras_mixprec.reporting.schema import PRECISION_CHANGES
from keras_mixprec.verdict_kinds import KINDS

# What a tuner does to the loss scale, and how it is told.
SCALE_CHANGES = {"raise_scale": "raised", "lower_scale": "lowered"}

# What a log says of the run as a whole.
STORY = frozenset(kind for kind, event in EVENTS.items() if event.is_story)

# Where what is beyond 16 bits is no matter.
WIDE = ("float32", "float64")


# What a layer computes in that is in float16 on inputs times a power of two.
_RESCALED = "rescaled float16"


def dtype_of(policy: str) -> str:
    """Returns what a policy computes in, as `dtype_now` has it."""
    if policy.startswith("rescaled("):
        return _RESCALED
    return policy.removeprefix("mixed_")


def dtype_now(layer: Mapping) -> str:
    """Returns what a layer computes in.

    Args:
        layer: Dict, as a log has it.
    """
    return _RESCALED if layer.get("rescaled") else layer["compute_dtype"]


def dtypes_now(events: list, layers: list) -> dict:
    """Returns what each layer computes in, by path.

    Args:
        events: List of dicts, by rising step: the table of layers has no row
            of the model itself, whose own code may have been at fault.
        layers: List of dicts, the table of layers.
    """
    changed = {
        path: dtype_of(change["after"])
        for event in events
        if event["kind"] in PRECISION_CHANGES and not event.get("dry_run")
        for path, change in event["layers"].items()
    }
    return changed | {layer["path"]: dtype_now(layer) for layer in layers}


def is_repaired(kind: str, dtype: str | None) -> bool:
    """Whether a layer computes by now in what such a finding asks for.

    Args:
        kind: String. The kind of a verdict.
        dtype: String, as `dtype_now` returns it, or `None` if not known.
    """
    repairs = KINDS[kind].repaired_by if kind in KINDS else ()
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


def last_change(layer: Mapping) -> int:
    """Returns after which step a layer's dtype last changed, -1 if never.

    A demotion before the first step has no dtype before it.

    Args:
        layer: Dict, a row of the table of layers with its demotion.
    """
    changes = [step for step, _ in layer["dtypes"][1:]][-1:]
    demoted = layer["demoted_at"]
    return max([-1, *changes] + ([] if demoted is None else [demoted]))


def asks_for_scale(verdict: Mapping) -> bool:
    """Whether another loss scale cures what a verdict says.

    Args:
        verdict: Dict, an event.
    """
    advised = "advised_bits" in verdict.get("numbers", {})
    return advised or verdict["verdict"] == "scale_too_low"


def scale_set(verdict: Mapping, events: list) -> dict | None:
    """Returns the event of a tuner that set the loss scale for a verdict.

    Args:
        verdict: Dict, an event.
        events: List of dicts, by rising step.

    Returns:
        The last such event, `None` if there is none.
    """
    if not asks_for_scale(verdict):
        return None
    found = [
        event
        for event in events
        if event["kind"] in SCALE_CHANGES
        and not event.get("dry_run")
        and event["step"] >= verdict["step"]
    ]
    return found[-1] if found else None


# The gravest first.
LEVELS = ("bad", "warning", "info")


def level_of(event: Mapping) -> str:
    """Returns how grave an event is: the one place that decides it.

    Text, page, picture and notebook show what this says.

    Args:
        event: Dict.

    Returns:
        One of `LEVELS`, or `"demote"`, `"promote"` or `"skip"`.
    """
    kind = event["kind"]
    # Neither what is over nor what somebody wanted.
    if any(event.get(x) for x in ("dry_run", "repaired", "interrupted")):
        return "info"
    if kind == "verdict":
        return level_of_verdict(event.get("verdict", ""))
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


def level_of_verdict(kind: str) -> str:
    """Returns how grave a kind of verdict is; one that is not known is bad."""
    return KINDS[kind].level if kind in KINDS else "bad"


def severity_of(kind: str) -> int:
    """Returns how grave a verdict is, an int; 0 of an unknown kind."""
    names = [*KINDS]
    return len(names) - names.index(kind) if kind in KINDS else 0


def low_scales(events: list) -> list[dict]:
    """Returns what says of loss scales that they are low, as of the end.

    Args:
        events: List of dicts, by rising step.
    """
    low: dict = {}
    for event in events:
        name = event.get("optimizer", "")
        if event["kind"] == "loss_scale_low":
            low[name] = event
        elif event["kind"] == "loss_scale_recovered":
            low.pop(name, None)
    return [*low.values()]


def last_of_falls(events: list) -> list:
    """Returns events with the last one alone of each fall of a loss scale.

    Each reading says again how far it fell since the step at which it began.

    Args:
        events: List of dicts, by rising step.
    """

    def fall(event):
        low = event["kind"] == "loss_scale_low" and "at_step" in event
        return (event.get("optimizer"), event["at_step"]) if low else id(event)

    last = {fall(event): event for event in events}
    return [event for event in events if last[fall(event)] is event]


class Story(list):
    """The events of a run that its one sentence is made of."""

    def add(self, step: int, event: Mapping):
        """Keeps an event if it is one of those.

        Args:
            step: Int.
            event: Dict, as `RunLog.event` takes it.
        """
        if event.get("kind") in STORY:
            self.append({**event, "step": step})


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


_NONE: dict = {"metrics": []}


def facts_of(overview: dict) -> Facts:
    """Returns the facts of the last `fit` in a log.

    Args:
        overview: Dict, as `RunData.overview` returns it.
    """
    before, events = _last_fit(overview["events"])
    first = events[0]["step"] if before else 0
    fits = sum(event["kind"] == "train_begin" for event in before) + 1
    skipped = {
        course["optimizer"]: _skipped_since(first, course)
        for course in overview["scale"]
    }
    steps = overview["last_step"] - first
    return Facts(
        _still_true(before, overview) + events,
        overview["layers"],
        steps,
        skipped,
        _in_a_row(events, overview["last_step"]),
        any(
            layer["least_headroom"] is not None for layer in overview["layers"]
        ),
        fits,
        first + 1,
        any(
            m["kind"] == "error" for m in (overview["heat"] or _NONE)["metrics"]
        ),
    )


def _last_fit(events):
    """Splits events into those of earlier fits and those of the last."""
    starts = [i for i, e in enumerate(events) if e["kind"] == "train_begin"]
    start = starts[-1] if starts else 0
    return events[:start], events[start:]


def _still_true(events, overview):
    """What was found in earlier fits of layers that are repaired by now."""
    now = dtypes_now(overview["events"], overview["layers"])
    repaired = [
        event
        for event in events
        if event["kind"] == "verdict"
        and is_repaired(event["verdict"], now.get(event["layer"]))
    ]
    # Without a finding, nothing is said of what was done about it.
    kinds = {*PRECISION_CHANGES} - {"undo"} if repaired else ()
    return repaired + [event for event in events if event["kind"] in kinds]


def _skipped_since(first, course):
    rows = list(zip(course["steps"], course["skipped"], strict=True))
    counts = [count for step, count in rows if step <= first][-1:] or [0]
    counts += [count for step, count in rows if step > first]
    # An optimizer that counts from 0 again was made for another run.
    return sum(
        now - before if now >= before else now
        for before, now in zip(counts, counts[1:], strict=False)
    )


def join_failing(events: list):
    """Dates faults that span several fits back to the first failing step.

    What trains knows of its own `fit` alone; the log has those before it.

    Args:
        events: List of dicts, by rising step; verdicts are changed in place.
    """
    skipped, known = None, {}
    for event in events:
        if event["kind"] != "verdict":
            continue
        since = event.get("failing_since")
        fault = event.get("verdict"), event.get("layer")
        # Other faults may have made the steps before it fail.
        if since is not None and fault in known:
            skipped = _skipped_steps(events) if skipped is None else skipped
            while since > known[fault] and since - 1 in skipped:
                since -= 1
            event["failing_since"] = since
        first = event.get("at_step", event["step"]) if since is None else since
        known[fault] = min(known.get(fault, first), first)


def _in_a_row(events, last_step):
    ends = [e for e in events if e["kind"] == "train_end"]
    if ends and isinstance(ends[-1].get("in_a_row"), int):
        return ends[-1]["in_a_row"]
    # A run that goes on, or was killed: what is known of single steps.
    skipped = _skipped_steps(events)
    count = 0
    while last_step - count in skipped:
        count += 1
    return count


def _skipped_steps(events):
    skipped = {
        event["at_step"]
        for event in events
        if event["kind"] == "skipped_step" and "at_step" in event
    }
    for event in events:
        if event["kind"] == "skipped_steps_not_kept" and _is_full(event):
            skipped |= {*range(event["first_step"], event["last_step"] + 1)}
    return skipped


def _is_full(block):
    """Whether a block of skipped steps has none between that was applied."""
    if "first_step" not in block:
        return False
    return block["count"] == block["last_step"] - block["first_step"] + 1
