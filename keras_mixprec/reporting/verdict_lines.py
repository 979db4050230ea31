"""The verdicts of a run as text; what is said alike of layers is said once."""

from collections import defaultdict
from collections.abc import Iterator

from keras_mixprec.formats import format_count, format_names
from keras_mixprec.reporting.facts import dtype_now, is_repaired

MOST_VERDICTS = 8
MOST_LAYERS = 5


def verdict_lines(events: list, layers: list) -> Iterator[str]:
    """Yields a line for each verdict, or for several that say the same.

    Args:
        events: List of dicts, as `RunData.overview` has them.
        layers: List of dicts, the table of layers.
    """
    now = {layer["path"]: dtype_now(layer) for layer in layers}
    groups = defaultdict(list)
    for event in events:
        if event["kind"] == "verdict":
            groups[_about(event, now)].append(event)
    if not groups:
        yield "No verdicts."
    # What a cause has brought about comes behind it.
    found = sorted(
        groups.values(), key=lambda own: own[0]["verdict"] == "scale_collapsed"
    )
    for event, *others in found[:MOST_VERDICTS]:
        where = f" in {event['layer']}" if event["layer"] else ""
        way = f", {event['direction']}" if event["direction"] else ""
        since = event.get("failing_since")
        failing = "" if since is None else f", failing since step {since:,}"
        step = event.get("at_step", event["step"])
        when = f"Step {step:,}" if step else "Before the first step"
        yield (
            f"{when}{failing}: {event['verdict']}{where}{way}. "
            f"{_advice(event, now)}{_same_for(others)}"
        )
    if (more := len(found) - MOST_VERDICTS) > 0:
        yield f"And {more} more verdicts."


def _about(event, now):
    """What verdicts that say the same have in common."""
    layer = event["layer"]
    over = is_repaired(event["verdict"], now.get(layer))
    named = event.get("same_as", layer)
    return event["verdict"], event["direction"], event["step"], named, over


def _advice(event, now):
    # What was done is not to be done again.
    dtype = now.get(event["layer"])
    repaired = is_repaired(event["verdict"], dtype)
    return f"Repaired: it is in {dtype} now." if repaired else event["advice"]


def _same_for(events):
    if not events:
        return ""
    paths = [event["layer"] for event in events]
    count = format_count(len(paths), "more layer")
    return f" The same in {count}: {format_names(paths, MOST_LAYERS)}."
