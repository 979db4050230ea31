"""The key figures of a run, which stand above all else on the page."""

import math
from collections import Counter

from keras_mixprec.formats import (
    format_bits,
    format_count,
    format_moment,
    format_share,
)
from keras_mixprec.reporting.event_rows import mark_of, moment, title_of
from keras_mixprec.reporting.facts import last_change
from keras_mixprec.reporting.format_limits import SPARE_BITS, is_wider

# What stands in place of a finding where little is known, by state.
_UNKNOWN = {"not_measured": "not measured", "not_compared": "none seen"}

# Part, its headroom and the step of it, and the verdicts that say that it
# overflows although readings may look safe.
_PARTS = (
    (
        "activations",
        "least_headroom",
        "worst_step",
        ("forward_overflow", "cast_overflow", "weight_overflow"),
    ),
    (
        "gradients",
        "least_gradient_headroom",
        "worst_gradient_step",
        ("backward_overflow",),
    ),
)


def key_figures(overview: dict) -> list[dict]:
    """Returns what a run comes down to, in numbers.

    Args:
        overview: Dict, as `RunData.overview` returns it, with `"finding"`.

    Returns:
        List of dicts with `"name"` and `"text"`, and where there is one
        `"title"`, which says more; `"level"`; and what it leads to: `"event"`,
        a place among the events, or `"layer"`, a path.
    """
    events, layers = overview["events"], overview["layers"]
    steps, skipped = overview["last_step"], overview["skipped"]
    fits = sum(event["kind"] == "train_begin" for event in events)
    share = (
        f" ({format_share(skipped / steps)})" if 0 < skipped <= steps else ""
    )
    of = f" of {steps:,}" if fits > 1 and skipped else ""
    skips = (n for n, e in enumerate(events) if e["kind"] == "skipped_step")
    dtypes = Counter(layer["compute_dtype"] for layer in layers)
    demoted = [x for x in layers if x["demoted_at"] is not None]
    to = " and ".join(dict.fromkeys(x["compute_dtype"] for x in demoted))
    found = [
        {
            "name": "steps",
            "text": f"{steps:,}" + f" in {fits} fits" * (fits > 1),
            "title": "steps count on over all calls of fit that logged here",
        },
        {
            "name": "skipped steps",
            "text": f"{skipped:,}{of}{share}",
            "event": next(skips, None),
        },
        {
            "name": "layers",
            "text": " · ".join(f"{n} {name}" for name, n in dtypes.items())
            or "0",
        },
        {
            "name": f"demoted to {to or 'float32'}",
            "text": format_count(len(demoted), "layer"),
            "layer": demoted[0]["path"] if demoted else None,
        },
    ]
    before, now = overview["share_of_flops"].values()
    if now is not None:
        ends = dict.fromkeys((format_share(before), format_share(now)))
        found.append(
            {
                "name": "FLOPs in 16 bits",
                "text": " → ".join(ends),
                "title": "share of the FLOPs in float16 or bfloat16, at first "
                "and now",
            }
        )
    for part in _PARTS:
        found += _least_headroom(overview, *part)
    if precision := overview["matmul_precision"]:
        products = precision.partition(", ")[0]
        is_full = products == "float32"
        found.append(
            {
                "name": "float32 products",
                "text": "in full precision" if is_full else f"in {products}",
                "title": "no dtype of the run: numbers that are in float32, as "
                "in the layers kept in it, are multiplied in " + precision,
            }
        )
    return [*found, {"name": "main finding", **main_finding(overview)}]


def main_finding(overview: dict) -> dict:
    """Returns what a run's sentence begins with, in a word or two.

    Args:
        overview: Dict with `"finding"`, `"events"` and `"headline"`.
    """
    finding, state = overview["finding"], overview["headline"]["state"]
    if finding is None and state in _UNKNOWN:
        return {"text": _UNKNOWN[state]}
    if finding is None:
        return {"text": "✓ none", "level": "fine"}
    title = title_of(overview["events"][finding["event"]])
    mark = mark_of(title, finding["level"], finding["repaired"])
    return mark | {"event": finding["event"]}


def headroom_level(bits: float) -> str | None:
    """Returns how grave such a headroom is, `None` if it is enough."""
    if bits <= 0:
        return "bad"
    return "warning" if bits < SPARE_BITS else None


def _least_headroom(overview, part, key, step_key, kinds):
    """How close a layer in 16 bits was to an overflow."""
    figure = {"name": f"least headroom, {part}", "level": "bad"}
    main, events = overview["finding"], overview["events"]
    lost = {**figure, "text": "▲ not finite", "event": main and main["event"]}
    stuck, layers = overview["stuck"], overview["layers"]
    if part == "gradients" and stuck:
        last = format_count(stuck, "step")
        about = f"infinite or NaN in the last {last}, which were skipped"
        return [lost | {"title": about}]
    limit = overview["format"]["name"]
    # What a wider dtype holds is not close, nor is what another layer made.
    own = [
        x
        for x in layers
        if not is_wider(x["compute_dtype"], limit)
        and not (x["passed_from"] or x["lost_because"])
    ]
    known = [x for x in own if x[key] is not None and x[key] < math.inf]
    if not known:
        because = (x["lost_because"] for x in layers if x["lost_because"])
        about = next((f"in all layers, because {x}" for x in because), None)
        is_lost = about and part == "activations"
        return [lost | {"title": about}] if is_lost else []
    worst = min(known, key=lambda layer: layer[key])
    bits, step = worst[key], worst[step_key]
    scaled = ", loss scale included, of finite readings"
    title = (
        f"{worst['path']}, {format_moment(step, 'after')}"
        f"{scaled * (part == 'gradients')}: the least since dtypes last changed"
    )
    level, text = headroom_level(bits), left_in_words(worst, key)
    if level != "bad" and (event := _overflow(events, own, kinds)):
        when = format_moment(moment(event))
        about = (
            f"overflow found in {event['layer']}, {when}, which readings do "
            f"not show. They are {text} at least: {title}"
        )
        where = {"event": events.index(event), "title": about}
        return [{**figure, "text": "▲ overflow found", **where}]
    if skips := _skipped_since(events, part, step):
        were = "were" if skips > 1 else "was"
        title += (
            f". {format_count(skips, 'step')} behind that reading overflowed "
            f"and {were} skipped"
        )
        text += ", then overflow" * (level != "bad")
    own_level = level or ("skip" if skips else None)
    more = {"text": text, "title": title, "layer": worst["path"]}
    return [figure | more | {"level": own_level}]


def left_in_words(layer: dict, key: str = "least_headroom") -> str:
    """Returns what is left of the headroom of a layer, with a mark if nothing.

    Args:
        layer: Dict, a row of the table of layers.
        key: String. Which headroom. Defaults to that of activations.
    """
    bits = layer[key]
    if layer["inside"] and key == "least_headroom":
        return "▲ overflow inside"
    if bits == -math.inf or bits > 0:
        return "▲ " * (bits < 0) + format_bits(bits)
    return "▲ overflow"


def add_gradients_left(layers: list):
    """Adds the least headroom of each layer's gradients in words.

    As `"gradients_left"`, empty if it was not measured.
    """
    for layer in layers:
        key, step = "least_gradient_headroom", "worst_gradient_step"
        known = layer[key] is not None and math.isfinite(layer[key])
        left = ""
        if known:
            when = format_moment(layer[step], "after")
            left = (
                "least headroom of this layer's gradients: "
                f"{left_in_words(layer, key)}, {when}"
            )
        layer["gradients_left"] = left


def _overflow(events, own, kinds):
    """A verdict that still holds; a forecast is none yet."""
    layers = {layer["path"]: layer for layer in own}
    for event in reversed(events):
        if (
            event["kind"] == "verdict"
            and event["verdict"] in kinds
            and event["layer"] in layers
            and "overflows_in_steps" not in event.get("numbers", {})
            and event["step"] > last_change(layers[event["layer"]])
        ):
            return event
    return None


def _skipped_since(events, part, step):
    """Steps skipped behind a reading, at which the part was not finite."""
    return sum(
        event["kind"] == "skipped_step"
        and moment(event) > step
        and not event.get("bad_input")
        and (part == "gradients" or bool(event.get("loss")))
        for event in events
    )
