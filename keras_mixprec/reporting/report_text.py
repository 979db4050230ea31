"""A run in a screen of text."""

import math
import textwrap
from collections import Counter, defaultdict

from keras_mixprec.formats import format_power
from keras_mixprec.nonfinite_kinds import BATCHES, STEPS, format_kinds

_WIDTH = 100
_MOST_VERDICTS = 8
_MOST_LAYERS = 5


def text(overview: dict) -> str:
    """Returns a run's story, the most important first.

    Args:
        overview: Dict, as `RunData.overview` returns it.
    """
    lines = [
        f"{overview['run']}: {overview['headline']['text']}",
        _steps(overview),
        _dtypes(overview["layers"]),
        *map(_scale, overview["scale"]),
        *_nonfinite(overview["events"]),
        *_demoted(overview["layers"]),
        *_verdicts(overview["events"]),
        *_headroom(overview["layers"]),
        *filter(None, [overview["withheld"]]),
    ]
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in lines
    )


def _steps(overview):
    count = overview["last_step"]
    fits = sum(e["kind"] == "train_begin" for e in overview["events"])
    several = f" in {fits} calls of fit" if fits > 1 else ""
    skipped = overview["skipped"]
    share = f" ({skipped / count:.2%})" if 0 < skipped <= count else ""
    return f"Steps: {count:,}{several}, {skipped or 'none'} skipped{share}."


def _dtypes(layers):
    counts = Counter(layer["compute_dtype"] for layer in layers)
    told = ", ".join(f"{n} in {dtype}" for dtype, n in counts.most_common())
    return f"Layers: {told or 'none'}."


def _scale(course):
    name = course["optimizer"]
    label = f"Loss scale of {name}" if name else "Loss scale"
    first, *_, last = course["scale"] * 2
    if min(course["scale"]) == max(course["scale"]):
        return f"{label}: {format_power(first)}."
    return (
        f"{label}: {format_power(first)} -> {format_power(last)}, at least "
        f"{format_power(min(course['scale']))} and at most "
        f"{format_power(max(course['scale']))}."
    )


def _nonfinite(events):
    counts = defaultdict(Counter)
    for event in events:
        if event["kind"] == "nonfinite_losses":
            counts["loss", "", BATCHES].update(event["counts"])
        elif event["kind"] == "nonfinite_gradients":
            name = event.get("optimizer", "")
            counts["gradients", name, STEPS].update(event["counts"])
    for (what, name, units), found in counts.items():
        of = f" of {name}" if name else ""
        yield f"Non-finite {what}{of}: {format_kinds(found, units)}."


def _demoted(layers):
    for layer in layers:
        if layer["demoted_at"] is not None:
            yield (
                f"Now in {layer['compute_dtype']}, since step "
                f"{layer['demoted_at']:,}: {layer['path']}{_because(layer)}."
            )


def _because(layer):
    # Without the numbers, which the verdict has.
    reason = (layer["demoted_because"] or "").partition(" (")[0]
    return f", because of {reason}" if reason else ""


def _verdicts(events):
    verdicts = [event for event in events if event["kind"] == "verdict"]
    # A symptom comes behind its causes.
    verdicts.sort(key=lambda event: event["verdict"] == "scale_collapsed")
    if not verdicts:
        yield "No verdicts."
    for event in verdicts[:_MOST_VERDICTS]:
        where = f" in {event['layer']}" if event["layer"] else ""
        way = f", {event['direction']}" if event["direction"] else ""
        yield (
            f"Step {event['step']:,}: {event['verdict']}{where}{way}. "
            f"{event['advice']}"
        )
    if (more := len(verdicts) - _MOST_VERDICTS) > 0:
        yield f"And {more} more verdicts."


def _headroom(layers):
    # What a wider layer holds would be no matter for it.
    low = [x for x in layers if x["compute_dtype"] != "float32"]
    told = [x for x in low if _is_range(x["least_headroom"])]
    told.sort(key=lambda layer: layer["least_headroom"])
    if told:
        yield "Least headroom: " + ", ".join(
            f"{x['path']} {_bits(x['least_headroom'])} at step "
            f"{x['worst_step']:,}"
            for x in told[:_MOST_LAYERS]
        )


def _is_range(bits):
    # Infinite if all numbers were zero.
    return bits is not None and bits < math.inf


def _bits(bits):
    return "not finite" if bits == -math.inf else f"{bits:.1f} bits"
