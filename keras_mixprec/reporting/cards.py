"""The cards of a run, which text, page, notebook and `to_dict` show."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.formats import (
    BATCHES,
    SIXTEEN_BITS,
    fill_screen,
    format_count,
    format_kinds,
    format_moment,
    format_names,
    format_power,
    format_share,
)
from keras_mixprec.reporting.bad_input import left_out
from keras_mixprec.reporting.event_kinds import UNREADABLE
from keras_mixprec.reporting.facts import low_scales
from keras_mixprec.reporting.flat_loss import loss_at
from keras_mixprec.reporting.format_limits import SPARE_BITS
from keras_mixprec.reporting.headline import STUCK, over_by, ranked
from keras_mixprec.reporting.layers import left_in_words
from keras_mixprec.reporting.performance import (
    figures,
    speed_in_words,
    speed_values,
)
from keras_mixprec.reporting.schema import TRADE_OFF_EVENT
from keras_mixprec.reporting.told import (
    counts_by_kind,
    harm,
    in_sentences,
    mark_of,
    title_of,
)
from keras_mixprec.reporting.what_next import tuner_did, what_next

_MOST_FINDINGS = 8

# Kinds of events whose advice the headline leaves out.
_ADVISED = ("metric_not_finite", "validation_not_finite")
_MOST_LAYERS = 5

# Words to show in place of the main finding if a run was not examined.
_UNKNOWN = {"not_measured": "not measured", "not_compared": "not compared"}


class Card(NamedTuple):
    """A part of a report about one subject.

    Attributes:
        name: String.
        title: String, shown before the sentence.
        sentence: String, one or a few sentences.
        figures: List of dicts with `"title"`, `"text"` and more.
        code: String, for the reader to copy.
        table: String. The key in `overview` that has the rows.
        chart: String. The key in `overview` that has the chart's data.
        is_on_top: Boolean. True for cards above all charts.
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
    """Returns a `Run` without its measurements by step, ready for JSON."""
    heat = {"metrics": run.metrics, "layers": run.rows}
    finding = run.finding
    if finding:
        named = {"event": "place", "repaired": "repaired", "level": "level"}
        finding = {name: finding[key] for name, key in named.items()}
    return {
        "run": run.name,
        "last_step": run.last_step,
        "skipped": run.skipped,
        "headline": run.headline,
        "finding": finding,
        "policy": policy_of(run.table),
        "share_of_flops": shares_in_16_bits(run.table),
        "cards": [card._asdict() for card in cards(run)],
        "layers": run.layers,
        "scale": run.scale,
        "loss": run.loss,
        "events": run.events,
        "told": run.told,
        "kinds": counts_by_kind(run),
        "bad_input": run.bad_input,
        "left_out": left_out(run.bad_input),
        "heat": heat if run.heat or run.errors else None,
        "format": run.format,
        "withheld": _last(run, "ranges_withheld"),
        "trade_off": (run.of_kind(TRADE_OFF_EVENT) or [None])[-1],
        "histograms": run.histogram_layers,
    }


def text(run) -> str:
    """Returns the cards of a run as text for the terminal."""
    first, *others = cards(run)
    lines = [f"{run.name} ({first.title}): {first.sentence}"]
    lines += [f"{x.title}: {x.sentence}" for x in others]
    return "\n".join(map(fill_screen, lines))


def cards(run) -> list[Card]:
    """Returns the cards of a `Run`, the most important first."""
    state = run.headline["state"]
    title, chips = state.replace("_", " "), [*_key_figures(run)]
    found = what_next(run.finding, run.events, run.layers)
    next_ = found or {"text": "", "code": ""}
    did = tuner_did(run)
    known = [
        Card("summary", title, run.headline["text"], chips),
        Card(
            "next",
            "What to do",
            next_["text"],
            [],
            next_["code"],
            is_on_top=True,
        ),
        *_findings(run),
        Card("tuner", "Tuner", did, is_on_top=True),
        *_loss(run),
        *_scale(run),
        *_speed(run),
        Card("layers", "Layers", _layers(run), table="layers"),
        Card("headroom", _HEADROOM, _headroom(run), chart="heat"),
        *_notes(run),
    ]
    return [card for card in known if card.sentence]


_HEADROOM = "Headroom of outputs (each bit is a factor of 2)"


def _last(run, kind):
    found = run.of_kind(kind)
    return found[-1].get("message", "") if found else ""


def _ended(text):
    return f"{text}." if text else ""


def _findings(run) -> Iterator[Card]:
    """Yields cards for all findings except the main one.

    The first card has the main finding.
    """
    is_over = over_by(run.events, run.layers)
    place = run.finding["place"] if run.finding else None
    rows = {id(run.events[n]): row for row in run.told for n in row["events"]}
    verdicts = ranked(run.of_kind("verdict"), is_over)
    found = [rows[id(v)] for v in verdicts if not is_over(v)]
    found += filter(_needs_advice, run.told)
    # Several calls to `fit` may report the same finding. The last one counts.
    known = {
        (row["title"], *row["layers"]): row
        for row in found
        if place not in row["events"]
    }
    still = [*known.values()]
    for row in still[:_MOST_FINDINGS]:
        when = format_moment(row["steps"][0], "").strip().capitalize()
        if row["kind"] == "before_training":
            when = "Before training"
        said = f"{row['title'].capitalize()}. {row['text']}"
        yield Card("finding", when, said)
    if (more := len(still) - _MOST_FINDINGS) > 0:
        yield Card("more", "And", f"{format_count(more, 'more finding')}.")
    gone: dict = {}
    for verdict in filter(is_over, verdicts):
        row = rows[id(verdict)]
        # The headline names all layers that were repaired with the main one.
        if place not in row["events"] or not run.finding["repaired"]:
            of_row = gone.setdefault(row["title"], {})
            of_row |= {verdict["layer"]: None} if verdict.get("layer") else {}
    ended = [
        f"{title} in {format_names([*layers], 2, 'layer')}" if layers else title
        for title, layers in gone.items()
    ]
    yield Card("repaired", "Also repaired", _ended("; ".join(ended)))


def _needs_advice(row):
    """Returns whether the advice of a finding is only in `row`."""
    is_early = row["kind"] == "before_training" and row["level"] == "bad"
    return is_early or row["kind"] in _ADVISED


def _loss(run) -> Iterator[Card]:
    """Yields a card with the first, lowest and last loss, or a flat loss."""
    if run.loss is None:
        return
    found = list(zip(run.loss["values"], run.loss["steps"], strict=True))
    said = loss_at(*found[-1])
    finite = [row for row in found if math.isfinite(row[0])]
    if len(found) > 1 and finite:
        least = min(finite)
        ends = f"{loss_at(*found[0])} (first)"
        if least not in (found[0], found[-1]):
            ends += f", {loss_at(*least)} (lowest)"
        said = f"{ends}, {said} (last)"
    # The headline of a failing run already explains the loss.
    flat = run.facts.flat_loss * (run.headline["state"] != "failing")
    bad: Counter = Counter()
    for event in run.of_kind("nonfinite_losses"):
        bad.update(event["counts"])
    kinds = format_kinds(bad, BATCHES)
    sentence = in_sentences(flat or said, kinds and f"it was {kinds}")
    yield Card("loss", "Loss", sentence, chart="loss", is_on_top=bool(flat))


def _scale(run) -> Iterator[Card]:
    """Yields a card for each loss scale, with the harm if it is low."""
    low = {e.get("optimizer", ""): e for e in low_scales(run.events)}
    # The card of the main finding already gives the advice for these kinds.
    told = {run.main.get("verdict"), run.main.get("cause"), ""}
    for course in run.scale:
        name, scale = course["optimizer"], course["scale"]
        title = f"Loss scale of {name}" if name else "Loss scale"
        first, *_, last = scale * 2
        said = format_power(first)
        if min(scale) != max(scale):
            said += f" -> {format_power(last)}"
            ends = {"lowest": min(scale), "highest": max(scale)}
            ends = {n: x for n, x in ends.items() if x not in (first, last)}
            named = ", ".join(f"{n} {format_power(x)}" for n, x in ends.items())
            said += f" ({named})" if named else ""
        if event := low.pop(name, None):
            advice = "" if event.get("cause") in told else event["advice"]
            said = in_sentences(said, harm(event, run), advice)
        else:
            said += "."
        yield Card("scale", title, said, chart="scale")


def _speed(run) -> Iterator[Card]:
    if not run.speed:
        return
    tuner = run.settings.get("tuner", True)
    watchers = "monitor and tuner" if tuner else "monitor"
    values = speed_values(run.speed)
    skipped = run.skipped / run.last_step if run.last_step else 0.0
    said = speed_in_words(values, watchers, min(skipped, 1))
    fits = len(run.begins)
    title = f"Speed of fit {fits} alone" if fits > 1 else "Speed"
    yield Card("speed", title, said, figures(values, watchers))


def _layers(run):
    counts = Counter(layer["compute_dtype"] for layer in run.layers)
    said = ", ".join(f"{n} in {dtype}" for dtype, n in counts.most_common())
    demoted = [x["path"] for x in run.layers if x["demoted_at"] is not None]
    if demoted:
        said += f"; demoted: {format_names(demoted, _MOST_LAYERS)}"
    precision, what = run.settings.get("matmul_precision"), ""
    if isinstance(precision, str) and not precision.startswith("float32"):
        what = f"float32 layers compute matrix products in {precision}"
    return in_sentences(said or "none", what, _last(run, "left_in_float16"))


def _by_headroom(run):
    """Returns the layers in 16 bits, the least headroom first."""
    known = [x for x in run.layers if x["headroom"]]
    known.sort(key=lambda layer: layer["headroom"]["rank"])
    wider = ("roomy", "beyond")
    return [x for x in known if x["headroom"]["level"] not in wider]


def _headroom(run):
    known = _by_headroom(run)
    said = [f"{x['path']!r} {x['headroom']['title']}" for x in known]
    return _ended(format_names(said, _MOST_LAYERS, "layer"))


def _notes(run) -> Iterator[Card]:
    """Yields notes about the run as a whole."""
    # The message about the graph rewrite starts with a dtype, so do not
    # capitalize the message.
    rewritten = _ended(_last(run, "graph_rewrite"))
    yield Card("graph_rewrite", "Graph rewrite", rewritten)
    for kind, title in (
        ("bad_batches", "Data"),
        (UNREADABLE, "Log"),
        ("ranges_withheld", "Not measured"),
    ):
        yield Card(kind, title, in_sentences(_last(run, kind)))


def _key_figures(run) -> Iterator[dict]:
    """Yields the most important numbers of a run."""
    steps, skipped, fits = run.last_step, run.skipped, len(run.begins)
    share = (
        f" ({format_share(skipped / steps)})" if 0 < skipped <= steps else ""
    )
    yield {
        "name": "steps",
        "text": f"{steps:,}" + f" in {fits} fits" * (fits > 1),
        "title": "steps of all calls to fit in this log",
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
        about = "share of the FLOPs in float16 or bfloat16, at start and now"
        name = "FLOPs in 16 bits"
        yield {"name": name, "text": " → ".join(ends), "title": about}
    place = run.finding["place"] if run.finding else None
    yield from _least(run)
    precision = run.settings.get("matmul_precision")
    if isinstance(precision, str):
        yield {
            "name": "float32 products",
            "text": precision.partition(", ")[0],
            "title": f"float32 layers compute matrix products in {precision}",
        }
    yield {"name": "main finding", "event": place} | finding_in_words(run)


def finding_in_words(run) -> dict:
    """Returns the main finding of a run in a word or two."""
    finding = run.finding
    if finding is None:
        unknown = _UNKNOWN.get(run.headline["state"])
        known = {"text": "✓ none", "level": "fine"}
        return {"text": unknown} if unknown else known
    title = title_of(finding["event"])
    return mark_of(title, finding["level"], finding["repaired"])


def _least(run) -> Iterator[dict]:
    """Yields the layers in 16 bits that were closest to an overflow."""
    layers = _by_headroom(run)
    levels = {"bad": "bad", "passed": "bad", "warning": "warning"}
    for layer in layers[:1]:
        found, path = layer["headroom"], layer["path"]
        yield {
            "name": "least headroom, activations",
            "text": found["text"],
            "title": f"{path}: {found['title']}",
            "layer": path,
            "level": levels.get(found["level"]),
        }
    name, key = "least headroom, gradients", "least_gradient_headroom"
    stuck = run.facts.in_a_row
    known = [x for x in layers if x[key] is not None and x[key] < math.inf]
    if stuck >= STUCK:
        last = format_count(stuck, "step")
        about = f"infinite or NaN in the last {last}, which were skipped"
        figure = {"text": "▲ not finite", "title": about, "level": "bad"}
        place = run.finding["place"] if run.finding else None
        yield {"name": name} | figure | {"event": place}
    elif known:
        worst = min(known, key=lambda layer: layer[key])
        step, bits = worst["worst_gradient_step"], worst[key]
        when = format_moment(step, "after")
        close = "warning" if bits < SPARE_BITS else None
        yield {
            "name": name,
            "text": left_in_words(bits),
            "title": f"{worst['path']}: loss scale included, finite readings "
            f"only, {when}",
            "layer": worst["path"],
            "level": "bad" if bits <= 0 else close,
        }


def shares_in_16_bits(table: list) -> dict:
    """Returns the share of the FLOPs in 16 bits, at the start and now.

    Args:
        table: List of dicts, the table of a `Run`.

    Returns:
        Dict with the floats `"before"` and `"now"`, `None` without layers.
    """
    first = [x | {"compute_dtype": x["dtypes"][0][1]} for x in table]
    shares = map(share_in_16_bits, (first, table))
    return dict(zip(("before", "now"), shares, strict=True))


def policy_of(table: list) -> str:
    """Returns the policy that the layers started with.

    Args:
        table: List of dicts, the table of a `Run`.

    Returns:
        String: the policy of the layers in 16 bits, such as `"mixed_float16"`,
        or `"float32"` if there are none.

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
