"""What a run comes down to: as a whole, and in a row of the table of runs."""

from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.reporting.facts import LEVELS, dtype_now, facts_of
from keras_mixprec.reporting.figures import main_finding as found_in_words
from keras_mixprec.reporting.flat_loss import flat_loss
from keras_mixprec.reporting.headline import (
    STATES,
    STUCK,
    headline,
    main_finding,
)
from keras_mixprec.reporting.schema import TRADE_OFF_EVENT
from keras_mixprec.reporting.what_next import (
    tuner_did,
    tuner_would,
    what_next,
)


def shares_in_16_bits(layers: list) -> dict:
    """Returns the share of the FLOPs in 16 bits, at first and by now.

    Args:
        layers: List of dicts, as `read_layers` returns them.

    Returns:
        Dict with `"before"` and `"now"`, floats, `None` without layers.
    """
    first = [x | {"compute_dtype": x["dtypes"][0][1]} for x in layers]
    return {
        "before": share_in_16_bits(first),
        "now": share_in_16_bits(layers),
    }


def policy_of(layers: list) -> str:
    """Returns the policy that layers were compiled with.

    Args:
        layers: List of dicts, as `read_layers` returns them.

    Returns:
        String, such as `"mixed_float16"`: that of the layers in 16 bits, or
        else `"float32"`, whatever they compute in by now.

    Example:
    >>> from keras_mixprec.reporting.run_summary import policy_of
    >>> policy_of([{"dtypes": [[0, "float16"], [9, "float32"]]}])
    'mixed_float16'
    """
    for layer in layers:
        first = layer["dtypes"][0][1]
        if first in SIXTEEN_BITS:
            pure = layer.get("variable_dtype") == first
            return first if pure else f"mixed_{first}"
    return "float32"


def searches_apart(events: list) -> tuple[list, list]:
    """Returns the searches for float32 layers, and all other events.

    Args:
        events: List of dicts.
    """
    kind = TRADE_OFF_EVENT
    found = [event for event in events if event["kind"] == kind]
    return found, [event for event in events if event["kind"] != kind]


def why_withheld(events: list) -> str | None:
    """Returns why ranges were not measured, `None` if that is not logged.

    Args:
        events: List of dicts.
    """
    logged = [e for e in events if e["kind"] == "ranges_withheld"]
    return logged[-1]["message"] if logged else None


def conclusion(overview: dict) -> dict:
    """Returns what is read off all the rest of a run.

    Args:
        overview: Dict, as `RunData.overview` returns it, without these.

    Returns:
        Dict with `"headline"`, as `headline` returns it, `"finding"`, as
        `main_finding` does but for its event's place among those of the run,
        `"stuck"`, how many steps were skipped in a row at the end, 0 if so few
        that a search for the loss scale explains them, `"flat_loss"`, as
        `flat_loss` does, `"tuner"`, as `tuner_did` or `tuner_would` does, and
        `"next"`, as `what_next` does.
    """
    facts = facts_of(overview)
    finding = main_finding(facts)
    if finding:
        places = {id(event): n for n, event in enumerate(overview["events"])}
        finding |= {"event": places[id(finding["event"])]}
    said = {"headline": headline(facts), "finding": finding}
    overview = overview | said
    overview = overview | {"flat_loss": flat_loss(overview)}
    return said | {
        "stuck": facts.in_a_row if facts.in_a_row >= STUCK else 0,
        "flat_loss": overview["flat_loss"],
        "tuner": tuner_did(overview["events"]) or tuner_would(overview),
        "next": what_next(overview),
    }


def _finding(overview):
    """What the sentence begins with, in a cell of the table."""
    finding = overview["finding"]
    if finding is None:
        return None
    event = overview["events"][finding["event"]]
    named = ("kind", "verdict", "layer")
    own = {name: event[name] for name in named if name in event}
    return own | {name: finding[name] for name in ("repaired", "level")}


def _cause(overview):
    """The main finding in words, and where it is."""
    finding, text = overview["finding"], found_in_words(overview)["text"]
    layer = finding and overview["events"][finding["event"]].get("layer")
    return f"{text} in {layer}" if layer else text


def _settings(overview):
    """What was set for the last `fit`, as far as it is logged."""
    begins = [e for e in overview["events"] if e["kind"] == "train_begin"]
    begin = begins[-1] if begins else {}
    tuner = "PrecisionTuner" if begin.get("tuner") else None
    own = {"policy": overview["policy"], "tuner": tuner}
    return begin.get("settings", {}) | own


def gravity(overview: dict) -> int:
    """Returns the rank of a run, 0 of the gravest.

    By its state, and among runs in the same by how grave their finding is.

    Args:
        overview: Dict, as `RunData.overview` returns it.
    """
    finding = _finding(overview)
    rank = len(LEVELS)
    if finding and not finding["repaired"]:
        rank = LEVELS.index(finding["level"])
    state = overview["headline"]["state"]
    return STATES.index(state) * (len(LEVELS) + 1) + rank


# Readings there may be few of: the speed itself is known.
_NO_SPEED = "trained", "steps"

_COPIED = (
    "run",
    "policy",
    "last_step",
    "skipped",
    "headline",
    "share_of_flops",
)


def summary(overview: dict) -> dict:
    """Returns the row of a run.

    Args:
        overview: Dict, as `RunData.overview` returns it.

    Returns:
        Dict with the run's name, policy, steps, skipped steps, last loss
        scales, last loss (`None` if none was logged), main finding, the same in
        words, settings, sentence,
        gravity (0 of the gravest), layers in float32, share of FLOPs in 16
        bits, what its speed is compared by (`None` if none was measured),
        samples a second (`None` if too few steps were timed, or most of them
        skipped), peak memory and the share of the bytes of outputs saved.

    Example:
    >>> from keras_mixprec.reporting.run_summary import summary
    >>> overview = {
    ...     "run": "a", "last_step": 9, "skipped": 1, "events": [],
    ...     "layers": [], "finding": None, "policy": "mixed_float16",
    ...     "headline": {"text": "9 steps.", "state": "healthy"},
    ...     "scale": [{"optimizer": "", "scale": [2.0, 4.0]}],
    ...     "share_of_flops": {"before": 1.0, "now": 0.5},
    ...     "loss": {"steps": [1, 9], "values": [2.5, 0.5]},
    ...     "performance": None,
    ... }
    >>> summary(overview)["scales"], summary(overview)["last_loss"]
    ([4.0], 0.5)
    """
    loss, found = overview["loss"], overview["performance"]
    figures = {f["name"]: f["value"] for f in (found or {}).get("figures", [])}
    speed = found and found["speed"]
    return {name: overview[name] for name in _COPIED} | {
        "scales": [c["scale"][-1] for c in overview["scale"] if c["scale"]],
        "last_loss": loss["values"][-1] if loss else None,
        "finding": _finding(overview),
        "cause": _cause(overview),
        "settings": _settings(overview),
        "gravity": gravity(overview),
        "speed": speed,
        # Of too few steps, or skipped ones, it is none of training.
        "samples_per_second": None
        if not speed or (speed["lacks"] or {}).get("what") in _NO_SPEED
        else figures["samples_per_second"],
        "peak_memory": figures.get("peak_memory"),
        "output_bytes_saved": figures.get("output_bytes_saved"),
        "layers": len(overview["layers"]),
        "in_float32": sum(
            dtype_now(layer) == "float32" for layer in overview["layers"]
        ),
        "demoted": sum(
            layer["demoted_at"] is not None for layer in overview["layers"]
        ),
    }
