"""The layers of a run: what they compute in, and what happened to them."""

import itertools
import math

import numpy as np

from keras_mixprec.formats import format_bits, format_digits, format_moment
from keras_mixprec.reporting.event_rows import mark_of, words
from keras_mixprec.reporting.facts import (
    dtype_now,
    dtype_of,
    is_repaired,
    level_of_verdict,
    scale_set,
    severity_of,
)
from keras_mixprec.reporting.format_limits import format_limits, is_wider
from keras_mixprec.reporting.grid import as_sent
from keras_mixprec.reporting.layer_tables import layer_of
from keras_mixprec.reporting.read_events import is_layer
from keras_mixprec.reporting.run_files import is_step
from keras_mixprec.reporting.schema import FED_BY, PRECISION_CHANGES

# Part: what its least headroom and the step of it are called.
_LEAST = {
    "activation": ("least_headroom", "worst_step"),
    "gradient": ("least_gradient_headroom", "worst_gradient_step"),
}
_INSIDE = "largest_inside_in_float32"


def read_layers(rows: list) -> list[dict]:
    """Returns the table of layers as it was last.

    Args:
        rows: List of dicts, the table at the start and after each change.

    Returns:
        List of dicts. `"dtypes"` of each is a list of pairs: after which step
        it computed in which dtype.
    """
    history: dict = {}
    table: list = []
    for row in rows:
        step, layers = row.get("step"), row.get("layers")
        if not is_step(step) or not isinstance(layers, list):
            continue
        table = [_with_feeders(x) for x in layers if is_layer(x)]
        for layer in table:
            dtypes = history.setdefault(layer["path"], [])
            dtype = layer["compute_dtype"]
            if not dtypes or dtypes[-1][1] != dtype:
                dtypes.append([step, dtype])
    return [layer | {"dtypes": [*history[layer["path"]]]} for layer in table]


def _with_feeders(layer):
    """A row with its feeders, if all of those are names of layers."""
    feeders = layer.get(FED_BY)
    named = isinstance(feeders, list) and all(
        isinstance(path, str) for path in feeders
    )
    known = {name: x for name, x in layer.items() if name != FED_BY}
    return known | ({FED_BY: feeders} if named else {})


def add_events(layers: list, events: list):
    """Adds the findings about each layer, and when it was demoted.

    Why a layer was demoted is in words: the numbers are those of the verdicts.
    """
    known = {layer["path"]: layer for layer in layers}
    for layer in layers:
        layer |= {"verdicts": [], "demoted_at": None, "demoted_because": None}
        layer["repaired_verdicts"] = []
        layer["severity"] = None
    for event in events:
        if event["kind"] == "verdict" and event.get("layer") in known:
            layer = known[event["layer"]]
            layer["verdicts"].append(event["verdict"])
            if scale_set(event, events):
                layer["repaired_verdicts"].append(event["verdict"])
            severity = severity_of(event["verdict"])
            layer["severity"] = max(layer["severity"] or 0, severity)
        made = event["kind"] in PRECISION_CHANGES and not event.get("dry_run")
        for path, change in event["layers"].items() if made else ():
            if path in known:
                _add_change(known[path], event, path, change)


def add_headroom(layers: list, tables: list):
    """Adds the least headroom of each layer's activations, and its step.

    And of its gradients, loss scale included, without those of steps that
    overflowed, since a dynamic loss scale is found by these. Only since the
    last change of precision: what overflowed before that is in the findings.
    Infinite if all numbers were zero.
    """
    changes = [step for layer in layers for step, _ in layer["dtypes"][1:]]
    since = max(changes, default=-1)
    paths = {layer["path"] for layer in layers}
    for part, (bits, step) in _LEAST.items():
        least = _least_headroom(tables, part, since, paths)
        for layer in layers:
            found = least.get(layer["path"], (None, None))
            layer |= dict(zip((bits, step), found, strict=True))


def _least_headroom(tables, part, since, paths):
    """By path, the least headroom since a step, and when that was."""
    metric, least = f"{part}_headroom_bits", {}
    for table in tables:
        if metric not in table.metrics or not len(table.steps):
            continue
        values = as_sent(table.column(metric, table.layers))
        values[table.steps <= since] = np.nan
        if part == "gradient":
            values[values == -np.inf] = np.nan
        rows = np.flatnonzero(~np.isnan(values).all(axis=0))
        places = np.nanargmin(values[:, rows], axis=0)
        for row, place in zip(rows, places, strict=True):
            found = values[place, row].item(), table.steps[place].item()
            path = layer_of(table.layers[row], paths)
            least[path] = min(least.get(path, found), found)
    return least


def add_inside(layers: list, events: list, limit: str):
    """Adds what overflows on the way to outputs that fit.

    `"inside"` is `None`, or a dict of the `"step"` at which a verdict said so,
    of the `"largest"` number inside of the layer in float32, of the
    `"outputs"`, their least headroom, and of the same in words.
    `"least_headroom"`, which is of outputs otherwise, is used up then.

    Args:
        layers: List of dicts, the table of layers.
        events: List of dicts.
        limit: String. The dtype that headroom refers to.
    """
    known = {layer["path"]: layer for layer in layers}
    for layer in layers:
        layer["inside"] = None
    maximum_bits = format_limits(limit)["maximum_bits"]
    for event in events:
        if event["kind"] != "verdict" or event["verdict"] != "forward_overflow":
            continue
        layer, largest = known.get(event["layer"]), _largest_inside(event)
        if layer and largest > 0 and _still_holds(event, layer, limit):
            _use_up(layer, event, largest, maximum_bits)
    for layer in layers:
        if layer["inside"]:
            layer["inside"] |= _inside_in_words(layer, limit, maximum_bits)


def _inside_in_words(layer, limit, maximum_bits):
    """What overflows inside of a layer, open until a wider dtype holds it."""
    largest, dtype = layer["inside"]["largest"], layer["compute_dtype"]
    bits = math.log2(largest) - maximum_bits
    numbers, by = "", ""
    if bits > 0:
        most = format_digits(2**maximum_bits)
        numbers = (
            f": numbers up to {format_digits(largest)}, {limit} holds up to "
            f"{most}"
        )
        by = f" by {format_bits(bits)}" * (bits < math.inf)
    if is_wider(dtype, limit):
        short, amount = f"beyond {limit} inside the layer", f"beyond {limit}"
        more = f", computed in {dtype}"
    else:
        short, amount = "overflow inside the layer", "overflow"
        more = f", found {format_moment(layer['inside']['step'])}"
    return {
        "long": f"{short}{numbers}{more}",
        "short": short,
        "amount": f"{amount} inside{by}",
        "is_open": not is_wider(dtype, limit),
    }


def _largest_inside(verdict):
    """0 if it does not say, as a forecast does not."""
    try:
        return float(verdict.get("numbers", {}).get(_INSIDE, 0))
    except (TypeError, ValueError):
        return 0.0


def _still_holds(verdict, layer, limit):
    """Whether its dtype would make it overflow, or is wider because of that."""
    if is_repaired("forward_overflow", dtype_now(layer)):
        return layer["compute_dtype"] != limit
    # One that was demoted and has returned since was found sound.
    changed = layer["dtypes"][-1][0] if layer["dtypes"][1:] else -1
    return verdict["step"] > changed


def _use_up(layer, verdict, largest, maximum_bits):
    # A sum may overflow on the way to a mean, and show in no other number.
    bits = min(maximum_bits - math.log2(largest), 0.0)
    left = layer["least_headroom"]
    # Outputs that are not finite, or as large, say more.
    if left is None or left > bits:
        step = verdict.get("at_step", verdict["step"])
        layer["inside"] = {"step": step, "largest": largest, "outputs": left}
        layer |= {"least_headroom": bits, "worst_step": step}


def add_repairs(layers: list):
    """Adds what is no finding any more.

    `"repaired_verdicts"` are those of a layer that computes by now in what they
    ask for, `"repaired"` whether these are all, `"marks"` each kind of verdict
    in words with its level.

    Args:
        layers: List of dicts, the table of layers.
    """
    for layer in layers:
        kinds = layer["verdicts"]
        now = dtype_now(layer)
        known = layer["repaired_verdicts"]
        repaired = [k for k in kinds if k in known or is_repaired(k, now)]
        layer |= {
            "repaired": bool(kinds) and repaired == kinds,
            "repaired_verdicts": repaired,
            "marks": [
                mark_of(words(k), level_of_verdict(k), k in repaired)
                for k in kinds
            ],
        }


def _add_change(layer, event, path, change):
    dtype = dtype_of(change["after"])
    known = [event["step"], dtype.rpartition(" ")[2]]
    layer["dtypes"] = _merged([*layer["dtypes"], known])
    # Not if it is undone, or was in an earlier run.
    demoted = dtype == dtype_now(layer) and event["kind"] == "demote"
    layer["demoted_at"] = event["step"] if demoted else None
    reason = event.get("because", {}).get(path)
    layer["demoted_because"] = reason if demoted else None


def _merged(dtypes):
    # The table is logged at the end of an epoch, a change at its own step.
    last = dict(sorted(dtypes, key=lambda pair: pair[0])).items()
    return [
        list(next(pairs))
        for _, pairs in itertools.groupby(last, lambda pair: pair[1])
    ]
