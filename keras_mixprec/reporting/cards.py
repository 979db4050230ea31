"""The cards of a run: what text, page, notebook and `to_dict` are made of."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.formats import (
    BATCHES,
    SIXTEEN_BITS,
    STEPS,
    format_bits,
    format_count,
    format_digits,
    format_kinds,
    format_moment,
    format_names,
    format_power,
    format_share,
)
from keras_mixprec.reporting.bad_input import left_out
from keras_mixprec.reporting.facts import WIDE, facts_of, low_scales, moment
from keras_mixprec.reporting.flat_loss import flat_loss
from keras_mixprec.reporting.format_limits import SPARE_BITS, is_wider
from keras_mixprec.reporting.headline import (
    STUCK,
    headline,
    main_finding,
    over_by,
    ranked,
)
from keras_mixprec.reporting.layers import left_in_words
from keras_mixprec.reporting.lowered_scale import harm
from keras_mixprec.reporting.performance import (
    figures,
    speed_in_words,
    speed_values,
)
from keras_mixprec.reporting.read_events import UNREADABLE
from keras_mixprec.reporting.told import (
    counts_by_kind,
    in_sentences,
    mark_of,
    said_alike,
    title_of,
    told,
)
from keras_mixprec.reporting.what_next import tuner_did, what_next
from keras_mixprec.verdict_kinds import place_in_words

_MOST_FINDINGS = 8

# What the sentence has without what to do about it.
_ADVISED = ("metric_not_finite", "validation_not_finite")
_MOST_LAYERS = 5

# What stands in place of a finding where little is known, by state.
_UNKNOWN = {"not_measured": "not measured", "not_compared": "not compared"}


class Card(NamedTuple):
    """What is told of one matter.

    Attributes:
        name: String.
        title: String, before the sentence.
        sentence: String. One or a few; empty if figures say it all.
        figures: List of dicts with `"title"` and `"text"`, and what else there
            is to a figure.
        code: String. What is to be copied.
        table: String. The key of the run that has the rows.
        chart: String. The key of the run that is drawn.
        is_on_top: Boolean. Whether it stands below the first one, above all
            pictures.
    """

    name: str
    title: str
    sentence: str = ""
    figures: list = []
    code: str = ""
    table: str = ""
    chart: str = ""
    is_on_top: bool = False


def overview(run) -> dict:
    """Returns all of a `Run` but the measurements by step, ready for JSON."""
    facts = facts_of(run)
    said, finding = headline(facts), main_finding(facts)
    place = None
    if finding:
        place = next(
            n for n, e in enumerate(run.events) if e is finding["event"]
        )
    return {
        "run": run.name,
        "last_step": run.last_step,
        "skipped": run.skipped,
        "headline": said,
        "finding": finding and finding | {"event": place},
        "policy": policy_of(run.table),
        "share_of_flops": shares_in_16_bits(run.table),
        "cards": [card._asdict() for card in cards(run, facts)],
        "layers": run.layers,
        "scale": run.scale,
        "loss": run.loss,
        "events": run.events,
        "told": told(run),
        "kinds": counts_by_kind(run),
        "bad_input": run.bad_input,
        "left_out": left_out(run.bad_input),
        "heat": {
            "metrics": run.metrics,
            "layers": run.rows,
        }
        if run.heat or run.errors
        else None,
        "format": run.format,
        "withheld": _last(run, "ranges_withheld"),
        "trade_off": run.trade_off,
        "histograms": {
            part: sorted(layers) for part, layers in run.histograms.items()
        },
    }


def text(run) -> str:
    """Returns a run's story, the most important first, a line a card."""
    first, *others = cards(run)
    lines = [f"{run.name} ({first.title}): {first.sentence}"]
    lines += [
        f"{card.title}: {card.sentence}" for card in others if card.sentence
    ]
    return "\n".join(lines)


def cards(run, facts=None) -> list[Card]:
    """Returns the cards of a `Run`, the most important first.

    Args:
        run: `Run`.
        facts: `Facts` of it. Defaults to `None`, which makes them.
    """
    facts = facts or facts_of(run)
    said, finding = headline(facts), main_finding(facts)
    state = said["state"].replace("_", " ")
    chips = [*_key_figures(run, facts, said["state"], finding)]
    found = what_next(finding, run.events, run.layers, run.loss)
    flat = (
        ""
        if _explains(run, said)
        else flat_loss(run.loss, run.events, run.layers)
    )
    return [
        Card("summary", state, said["text"], chips),
        *_next(found),
        *_findings(run, finding),
        *_said(
            "tuner", "Tuner", tuner_did(run.events, run.layers), on_top=True
        ),
        *_loss(run, flat),
        *_steps(run),
        *_scale(run, finding),
        *_speed(run),
        *_layers(run),
        *_headroom(run),
        *_not_at_fault(run),
        *_notes(run),
    ]


def _explains(run, said):
    """Whether a run fails or has skipped most steps: so its loss is flat."""
    return 2 * run.skipped >= run.last_step or said["state"] == "failing"


def _said(name, title, sentence, on_top=False, **more):
    return (
        [Card(name, title, sentence, is_on_top=on_top, **more)]
        if sentence
        else []
    )


def _next(found):
    if found:
        text, code = found["text"], found["code"]
        yield Card("next", "What to do", text, code=code, is_on_top=True)


def _last(run, kind):
    found = run.of_kind(kind)
    return found[-1].get("message", "") if found else ""


# What was found.


def _findings(run, finding) -> Iterator[Card]:
    """What was found beside the main finding, which the first card tells."""
    is_over = over_by(run.events, run.layers)
    groups = defaultdict(list)
    for verdict in ranked(run.of_kind("verdict"), is_over):
        own = groups[said_alike(verdict), is_over(verdict)]
        # Two fits may find the same at the step between them.
        if verdict["layer"] not in [known["layer"] for known in own]:
            own.append(verdict)
    main = finding and finding["event"]
    others = [own for own in groups.values() if not any(v is main for v in own)]
    still = [own for own in others if not is_over(own[0])]
    shown = still[:_MOST_FINDINGS]
    for own in shown:
        when = format_moment(moment(own[0]), "").strip().capitalize()
        yield Card("finding", when, _finding(own))
    yield from _said("more", "And", more_of(len(still) - len(shown)))
    gone = [_kind(own[0]) for own in others if is_over(own[0])]
    named = "; ".join(dict.fromkeys(gone))
    yield from _said("repaired", "Also repaired", f"{named}." if named else "")
    for kind in _ADVISED:
        for event in run.of_kind(kind)[-1:] if main is not None else ():
            if event is not main and event.get("advice"):
                title = title_of(event).capitalize()
                yield Card("finding", title, event["advice"])
    # Of the last call of `fit`, each logs them again.
    known = {
        (event["finding"], event.get("layer")): event
        for event in run.of_kind("before_training")
        if event["level"] == "bad"
    }
    for event in [*known.values()][:_MOST_FINDINGS]:
        where = f" in {event['layer']}" if event.get("layer") else ""
        said = in_sentences(event["message"], event.get("advice"))
        said = f"{event['finding']}{where}. {said}"
        yield Card("before_training", "Before training", said)


def more_of(count: int) -> str:
    """Returns that there are so many more findings, empty if there are none."""
    return f"{format_count(count, 'more finding')}." if count > 0 else ""


def _kind(verdict):
    about = (verdict[name] for name in ("verdict", "layer", "direction"))
    return f"{verdict['verdict']}{place_in_words(*about)}"


def _finding(verdicts):
    first, *others = verdicts
    since, numbers = first.get("failing_since"), first.get("numbers", {})
    by, code = numbers.get("found_by"), numbers.get("code")
    failing = f" (steps began to fail at step {since:,})" if since else ""
    line = f" at {code}" if code else ""
    who = f" (found by {by})" if by else ""
    said = f"{_kind(first)}{line}{failing}{who}. {first.get('advice', '')}"
    if others:
        paths = [verdict["layer"] for verdict in others]
        count = format_count(len(paths), "more layer")
        said += f" The same in {count}: {format_names(paths, _MOST_LAYERS)}."
    return said.rstrip()


# How training went.


def _loss(run, flat) -> Iterator[Card]:
    """The first, the lowest and the last loss."""
    if run.loss is None:
        return
    values, steps = run.loss["values"], run.loss["steps"]
    found = list(zip(values, steps, [0, *steps], strict=False))
    said = _mean_over(*found[-1])
    finite = [row for row in found if math.isfinite(row[0])]
    if len(found) > 1 and finite:
        least = min(finite)
        ends = f"{_mean_over(*found[0])} (first)"
        if least not in (found[0], found[-1]):
            ends += f", {_mean_over(*least)} (lowest)"
        said = f"{ends}, {said} (last)"
    bad = Counter()
    for event in run.of_kind("nonfinite_losses"):
        bad.update(event["counts"])
    kinds = format_kinds(bad, BATCHES)
    lost = f"it was {kinds}" if kinds else ""
    sentence = in_sentences(flat or said, lost)
    yield Card("loss", "Loss", sentence, chart="loss", is_on_top=bool(flat))


def _mean_over(value, last, before):
    """A point of the curve is the mean of the steps since the one before."""
    shown = format_digits(value) if math.isfinite(value) else "not finite"
    first = before + 1
    if last == first:
        return f"{shown} at step {last:,}"
    return f"{shown} over steps {first:,} to {last:,}"


def _steps(run) -> Iterator[Card]:
    """Of several calls of `fit`, the last of which the first card is about."""
    fits, count = len(run.begins), run.last_step
    if fits > 1:
        skipped = f"{run.skipped:,}" if run.skipped else "none"
        said = f"{count:,} in {fits} calls of fit, {skipped} skipped."
        yield Card("steps", "Steps", said)


def _scale(run, finding) -> Iterator[Card]:
    """How each loss scale went, and what a low one costs."""
    low = {
        event.get("optimizer", ""): event for event in low_scales(run.events)
    }
    # The main finding has its advice in a card of its own.
    main = finding["event"] if finding else {}
    told = {main.get("verdict"), main.get("cause"), ""}
    for course in run.scale:
        name, scale = course["optimizer"], course["scale"]
        title = f"Loss scale of {name}" if name else "Loss scale"
        first, *_, last = scale * 2
        said = format_power(first)
        if min(scale) != max(scale):
            ends = {"lowest": min(scale), "highest": max(scale)}
            beyond = ", ".join(
                f"{which} {format_power(bits)}"
                for which, bits in ends.items()
                if bits not in (first, last)
            )
            said += f" -> {format_power(last)}"
            said += f" ({beyond})" if beyond else ""
        if event := low.pop(name, None):
            advice = "" if event.get("cause") in told else event["advice"]
            said = in_sentences(said, harm(event, run), advice)
        else:
            said += "."
        counts: Counter = Counter()
        for event in run.of_kind("nonfinite_gradients"):
            if event.get("optimizer", "") == name:
                counts.update(event["counts"])
        if kinds := format_kinds(counts, STEPS):
            said += f" Gradients were {kinds}."
        yield Card("scale", title, said, chart="scale")


def _speed(run) -> Iterator[Card]:
    if not run.speed:
        return
    tuner = run.settings.get("tuner", True)
    watchers = "monitor and tuner" if tuner else "monitor"
    values = speed_values(run.speed, run.layers)
    skipped = run.skipped / run.last_step if run.last_step else 0.0
    said = speed_in_words(values, watchers, min(skipped, 1))
    fits = len(run.begins)
    title = f"Speed of fit {fits} alone" if fits > 1 else "Speed"
    yield Card("speed", title, said, figures(values, watchers))


# The layers.


def _layers(run) -> Iterator[Card]:
    counts = Counter(layer["compute_dtype"] for layer in run.layers)
    said = ", ".join(f"{n} in {dtype}" for dtype, n in counts.most_common())
    demoted = [x["path"] for x in run.layers if x["demoted_at"] is not None]
    if demoted:
        said += f"; demoted: {format_names(demoted, _MOST_LAYERS)}"
    precision = run.settings.get("matmul_precision")
    if isinstance(precision, str) and not precision.startswith("float32"):
        said += f". Matrix products of float32 layers are in {precision}"
    left = _last(run, "left_in_float16")
    said = in_sentences(said or "none", left)
    yield Card("layers", "Layers", said, table="layers")


def _own(run):
    """Layers in 16 bits that show what they made themselves."""
    return [
        x
        for x in run.layers
        if x["compute_dtype"] not in WIDE
        and not is_wider(x["compute_dtype"], run.format["name"])
        and not (x["passed_from"] or x["lost_because"])
    ]


def _headroom(run) -> Iterator[Card]:
    own = [x for x in _own(run) if x["least_headroom"] not in (None, math.inf)]
    least = ", ".join(
        f"{x['path']!r} {format_bits(x['least_headroom'])} "
        f"({format_moment(x['worst_step'], 'after')})"
        for x in sorted(own, key=lambda x: x["least_headroom"])[:_MOST_LAYERS]
    )
    if least:
        title = "Outputs nearest to overflow (each bit is a factor of 2)"
        yield Card("headroom", title, f"{least}.", chart="heat")
    zero = [x["path"] for x in run.layers if x["least_headroom"] == math.inf]
    passed = {x["path"] for x in run.layers if x["passed_from"]}
    zero = [path for path in zero if path not in passed]
    named = format_names(zero, _MOST_LAYERS, "layer")
    title = "All zero in every reading"
    yield from _said("zeros", title, f"activations of {named}." if zero else "")


def _not_at_fault(run) -> Iterator[Card]:
    behind = defaultdict(list)
    for layer in run.layers:
        if source := layer["passed_from"]:
            what = (
                "all zero"
                if layer["least_headroom"] == math.inf
                else "infinite or NaN"
            )
            behind[f"what {source} returns is {what}"].append(layer["path"])
        elif because := layer["lost_because"]:
            behind[because].append(layer["path"])
    said = [
        f"{format_names(paths, _MOST_LAYERS, 'layer')}, because {why}"
        for why, paths in behind.items()
    ]
    shown = "; ".join(said[:_MOST_LAYERS])
    more = f"; {len(said) - _MOST_LAYERS} more" if said[_MOST_LAYERS:] else ""
    yield from _said("blame", "Not at fault", f"{shown}{more}." if said else "")


def _notes(run) -> Iterator[Card]:
    """What is about the run as a whole."""
    found = [v.get("numbers", {}) for v in run.of_kind("verdict")]
    known = any(name.startswith("samples_of_") for n in found for name in n)
    for kind, title in (
        ("graph_rewrite", "Graph rewrite"),
        ("ignored_variable", "Environment"),
        ("bad_batches", "Data"),
        (UNREADABLE, "Log"),
        ("ranges_withheld", "Not measured"),
    ):
        # Rows of the whole arrays say more than those of batches.
        if not (known and kind == "bad_batches"):
            yield from _said(kind, title, in_sentences(_last(run, kind)))


# The key figures.


def _key_figures(run, facts, state, finding) -> Iterator[dict]:
    """What a run comes down to, in numbers, each with what it leads to."""
    steps, skipped, fits = run.last_step, run.skipped, len(run.begins)
    share = (
        f" ({format_share(skipped / steps)})" if 0 < skipped <= steps else ""
    )
    yield {
        "name": "steps",
        "text": f"{steps:,}" + f" in {fits} fits" * (fits > 1),
        "title": "steps count on over all calls of fit that logged here",
    }
    skips = (n for n, e in enumerate(run.events) if e["kind"] == "skipped_step")
    event = next(skips, None)
    yield {
        "name": "skipped steps",
        "text": f"{skipped:,}{share}",
        "event": event,
    }
    before, now = shares_in_16_bits(run.table).values()
    if now is not None:
        ends = dict.fromkeys((format_share(before), format_share(now)))
        about = "share of the FLOPs in float16 or bfloat16, at first and now"
        name = "FLOPs in 16 bits"
        yield {"name": name, "text": " → ".join(ends), "title": about}
    stuck = facts.in_a_row if facts.in_a_row >= STUCK else 0
    place = None
    if finding:
        place = next(
            n for n, e in enumerate(run.events) if e is finding["event"]
        )
    for part in _PARTS:
        yield from _least(run, *part, stuck, place)
    precision = run.settings.get("matmul_precision")
    if isinstance(precision, str):
        yield {
            "name": "float32 products",
            "text": precision.partition(", ")[0],
            "title": "no dtype of the run: numbers that are in float32, as in "
            "the layers kept in it, are multiplied in " + precision,
        }
    mark = finding_in_words(finding, state)
    yield {"name": "main finding", "event": place} | mark


def finding_in_words(finding: dict | None, state: str) -> dict:
    """Returns what a run's sentence begins with, in a word or two.

    Args:
        finding: Dict, as `main_finding` returns it.
        state: String, that of the run.
    """
    if finding is None:
        if state in _UNKNOWN:
            return {"text": _UNKNOWN[state]}
        return {"text": "✓ none", "level": "fine"}
    title = title_of(finding["event"])
    return mark_of(title, finding["level"], finding["repaired"])


_PARTS = (
    ("activations", "least_headroom", "worst_step"),
    ("gradients", "least_gradient_headroom", "worst_gradient_step"),
)


def _least(run, part, key, step_key, stuck, place) -> Iterator[dict]:
    """How close a layer in 16 bits was to an overflow."""
    figure = {"name": f"least headroom, {part}", "level": "bad"}
    lost = figure | {"text": "▲ not finite", "event": place}
    if part == "gradients" and stuck:
        last = format_count(stuck, "step")
        about = f"infinite or NaN in the last {last}, which were skipped"
        yield lost | {"title": about}
        return
    known = [x for x in _own(run) if x[key] is not None and x[key] < math.inf]
    because = [x["lost_because"] for x in run.layers if x["lost_because"]]
    if known:
        worst = min(known, key=lambda layer: layer[key])
        bits, when = worst[key], format_moment(worst[step_key], "after")
        scaled = ", loss scale included, of finite readings"
        about = f"{worst['path']}, {when}{scaled * (part == 'gradients')}"
        close = "warning" if bits < SPARE_BITS else None
        yield figure | {
            "text": left_in_words(worst, key),
            "title": f"{about}: the least since dtypes last changed",
            "layer": worst["path"],
            "level": "bad" if bits <= 0 else close,
        }
    elif because and part == "activations":
        yield lost | {"title": f"in all layers, because {because[0]}"}


def shares_in_16_bits(table: list) -> dict:
    """Returns the share of the FLOPs in 16 bits, at first and by now.

    Args:
        table: List of dicts, the table of a `Run`.

    Returns:
        Dict with `"before"` and `"now"`, floats, `None` without layers.
    """
    first = [x | {"compute_dtype": x["dtypes"][0][1]} for x in table]
    shares = map(share_in_16_bits, (first, table))
    return dict(zip(("before", "now"), shares, strict=True))


def policy_of(table: list) -> str:
    """Returns the policy that layers were compiled with.

    Args:
        table: List of dicts, the table of a `Run`.

    Returns:
        String, such as `"mixed_float16"`: that of the layers in 16 bits, or
        else `"float32"`, whatever they compute in by now.

    Example:
    >>> from keras_mixprec.reporting.cards import policy_of
    >>> policy_of([{"dtypes": [[0, "float16"], [9, "float32"]]}])
    'mixed_float16'
    """
    for layer in table:
        first = layer["dtypes"][0][1]
        if first in SIXTEEN_BITS:
            pure = layer.get("variable_dtype") == first
            return first if pure else f"mixed_{first}"
    return "float32"
