"""The verdicts of a run as text; what is said alike of layers is said once."""

from collections import defaultdict
from collections.abc import Iterator

from keras_mixprec.formats import format_count, format_names, format_power
from keras_mixprec.reporting.facts import (
    SCALE_CHANGES,
    dtypes_now,
    is_repaired,
    scale_set,
)
from keras_mixprec.verdict_kinds import place_in_words

MOST_VERDICTS = 8
MOST_LAYERS = 5


def verdict_lines(events: list, layers: list) -> Iterator[str]:
    """Yields a line for each verdict, or for several that say the same.

    Args:
        events: List of dicts, as `RunData.overview` has them.
        layers: List of dicts, the table of layers.
    """
    now = dtypes_now(events, layers)
    groups = defaultdict(list)
    for event in events:
        if event["kind"] == "verdict":
            over = _how_repaired(event, now, events)
            own = groups[_about(event, over)]
            # Two fits may find the same at the step between them.
            if event["layer"] not in (found["layer"] for found, _ in own):
                own.append((event, over))
    # What a cause has brought about comes behind it.
    found = sorted(
        groups.values(),
        key=lambda own: own[0][0]["verdict"] == "scale_collapsed",
    )
    for (event, over), *others in found[:MOST_VERDICTS]:
        about = event["verdict"], event["layer"], event["direction"]
        where = place_in_words(*about)
        since = event.get("failing_since")
        failing = ""
        if since is not None:
            failing = f" (steps began to fail at step {since:,})"
        step = event.get("at_step", event["step"])
        when = f"Step {step:,}" if step else "Before the first step"
        numbers = event.get("numbers", {})
        by, code = numbers.get("found_by"), numbers.get("code")
        who = f" (found by {by})" if by else ""
        line = f" at {code}" if code and not over else ""
        yield (
            f"{when}{failing}: {event['verdict']}{where}{line}{who}. "
            f"{over or event['advice']}{_same_for(others)}"
        )
    if (more := len(found) - MOST_VERDICTS) > 0:
        yield f"And {more} more verdicts."


def _about(event, over):
    """What verdicts that say the same have in common."""
    named = event.get("same_as", event["layer"])
    return event["verdict"], event["direction"], event["step"], named, over


def _how_repaired(event, now, events):
    """How it is repaired, `None` if not: that is not to be done again."""
    dtype = now.get(event["layer"])
    if is_repaired(event["verdict"], dtype):
        return f"Repaired: it is in {dtype} now."
    if change := scale_set(event, events):
        done = SCALE_CHANGES[change["kind"]]
        scale = format_power(change["after"])
        return f"Repaired: the loss scale is {done} to {scale}."
    return None


def _same_for(events):
    if not events:
        return ""
    paths = [event["layer"] for event, _ in events]
    count = format_count(len(paths), "more layer")
    return f" The same in {count}: {format_names(paths, MOST_LAYERS)}."
