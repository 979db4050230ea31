"""Predicts how layers would behave in a different format, and makes a plan.

The prediction uses only the ranges of the numbers that layers return. The
logged headroom gives the largest magnitude, and the exponent histograms give
the smallest magnitude that counts. Ranges cannot show a loss of precision.
"""

import bisect
import collections
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from keras_mixprec.flop_shares import flops
from keras_mixprec.formats import (
    format_count,
    format_digits,
    format_moment,
    format_names,
    format_share,
)
from keras_mixprec.reporting.bad_input import left_out
from keras_mixprec.reporting.facts import (
    dtype_at,
    is_repaired,
    kind_of,
    moment,
)
from keras_mixprec.reporting.format_limits import (
    CHOICES,
    SPARE_BITS,
    format_limits,
    measured_against,
)
from keras_mixprec.reporting.layer_tables import MAX_COLUMNS, as_sent, layer_of
from keras_mixprec.reporting.told import words

# The formats that a plan can set. Users can set float8 with Keras' `quantize`.
_PLANNED = ("float16", "bfloat16")

# Possible loss scales as powers of two, and the initial scale of Keras.
_SCALES = range(-14, 127)
_USUAL_SCALE = 15

# The states of a layer, the most severe first, with their levels and words.
_STATES = {
    "overflows": ("bad", "would overflow"),
    "lost": ("bad", "not finite in this run"),
    "refused": ("bad", "with a verdict of the run"),
    "no scale": ("bad", "no loss scale would fit"),
    "vanishes": ("warning", "would lose small numbers that count"),
    "close": ("warning", f"within {SPARE_BITS} bits of overflowing"),
    "passed": (None, "not known, because of another layer or the run"),
    "unknown": (None, "not measured"),
    "zero": (None, "with zeros alone"),
    "fits": (None, "would fit"),
}
_ORDER = [*_STATES]

# Kinds of verdicts on runs whose ranges are useless for a plan.
_NO_PLAN = {
    "divergence": "No plan: training diverges in float32 too, so its ranges "
    "say nothing about a healthy run.",
    "weights_lost": "No plan: the weights are not finite, so these ranges say "
    "nothing about a healthy run. Restore a checkpoint first.",
}


class _Part(NamedTuple):
    """The prediction for a part of a layer in a format.

    `asks` is true if this part needs float32 in a plan.
    """

    state: str
    text: str
    asks: bool = False


class _Judged(NamedTuple):
    """The prediction for a layer in a format: its parts and worst state.

    `window` has the lowest and the highest loss scale, as powers of two, at
    which gradients neither vanish nor overflow.
    """

    state: str
    activation: _Part
    weight: _Part
    window: tuple[float, int] | None
    refused: str


def what_if_of(run, columns: int = MAX_COLUMNS) -> dict:
    """Returns the result of `what_if` for a `Run`."""
    is_open = run.finding and not run.finding["repaired"]
    verdict = run.main.get("verdict", "") if is_open else ""
    ranges = run_ranges(run, columns)
    found = what_if(run.layers, ranges, run.bad_input, verdict)
    return {"run": run.name} | found


def what_if(
    layers: list, ranges: dict, bad_input: Iterable = (), verdict: str = ""
) -> dict:
    """Predicts each layer in each format, and makes the smallest plans.

    Args:
        layers: List of dicts, the layers of a `Run`.
        ranges: Dict from `run_ranges`.
        bad_input: Steps with a non-finite batch. Defaults to none.
        verdict: String. The kind of the main finding, empty if repaired.

    Returns:
        Dict with `"measured"`, false if there are no ranges, and `"formats"`, a
        dict from names to dicts with

        - `"layers"`: dicts, the worst first, with `"path"`, `"state"`,
          `"said"` (the state in words), and `"activations"`, `"gradients"` and
          `"weights"` in words with their levels;
        - `"plan"`: a dict of `"text"` and `"file"`, the content for
          `PrecisionPlan.load`, or `None` if there is no plan.
    """
    formats = {}
    for dtype in CHOICES:
        own = ranges["layers"]
        judged = {
            x["path"]: _judged(x, own.get(x["path"], {}), dtype) for x in layers
        }
        rows = [_row(layer, judged[layer["path"]]) for layer in layers]
        rows.sort(key=lambda row: _ORDER.index(row["state"]))
        plan = {"text": _NO_PLAN.get(verdict, ""), "file": None}
        if dtype not in _PLANNED:
            plan["text"] = f"Plans exist for {' and '.join(_PLANNED)} only."
        elif verdict not in _NO_PLAN:
            plan = _plan(layers, judged, ranges, dtype, [*bad_input])
        formats[dtype] = {"layers": rows, "plan": plan}
    return {"measured": bool(ranges["layers"]), "formats": formats}


def _row(layer, found):
    level, said = _STATES[found.state]
    activation, weight = (
        {"text": part.text, "level": _STATES[part.state][0]}
        for part in (found.activation, found.weight)
    )
    if found.refused and activation["level"] != "bad":
        activation = {"text": found.refused, "level": "bad"}
    if layer.get("parameters") == 0:
        weight["text"] = "none"
    empty = "bad" if _is_empty(found.window) else None
    return {
        "path": layer["path"],
        "state": found.state,
        "said": said,
        "level": level,
        "activations": activation,
        "gradients": {"text": _window_in_words(found.window), "level": empty},
        "weights": weight,
    }


def _judged(layer, own, dtype):
    limits = format_limits(dtype)
    activation = _part(own.get("activation"), limits)
    if lost := _lost(layer):
        most = format_limits(lost["dtype"])["maximum_bits"]
        largest = (own.get("activation") or {}).get("largest")
        # Only a wider dtype shows how large the infinite numbers were.
        if largest is None or largest <= most:
            text = f"not finite in {lost['dtype']}{_at(lost['step'])}"
            activation = _Part("lost", text, True)
            if limits["maximum_bits"] > most:
                text += "; the true size is not known"
                activation = _Part("unknown", text, True)
    elif activation.state == "unknown":
        if layer["least_headroom"] == math.inf:
            activation = _Part("zero", "all values are zero")
        if passed := layer["passed"]:
            activation = _Part("passed", f"{passed['short']}: not known")
    weight = _part(own.get("weight"), limits)
    window = _window(own.get("gradient"), limits, own.get("weight_gradient"))
    kinds = own.get("refused", {}).get(dtype, [])
    # A layer may overflow inside although its outputs do not.
    said = f"the run found {', '.join(map(words, kinds))} here" if kinds else ""
    states = {activation.state, weight.state}
    states |= {"refused"} if kinds else set()
    states |= {"no scale"} if _is_empty(window) else set()
    grave = (x for x in _ORDER[: _ORDER.index("passed")] if x in states)
    state = next(grave, activation.state)
    return _Judged(state, activation, weight, window, said)


def _lost(layer):
    """Returns when and in which dtype a layer itself failed, or `None`."""
    is_lost = layer["least_headroom"] == -math.inf
    if not is_lost or layer["passed"] or layer["lost_because"]:
        return None
    step = layer["worst_step"]
    return {"step": step, "dtype": dtype_at(layer, step)}


def _part(reading, limits):
    if not reading or reading["largest"] is None:
        return _Part("unknown", "not measured")
    bits, low = limits["maximum_bits"] - reading["largest"], reading["low"]
    at = _at(reading["largest_step"])
    number = format_digits(round(abs(bits), 1))
    if bits < 0:
        beyond = f"{number} bits beyond {limits['name']}"
        return _Part("overflows", f"overflow: {beyond}{at}", True)
    if low is not None and low < limits["subnormal_exponent"]:
        small = "small numbers that matter become 0"
        return _Part("vanishes", f"{number} bits left{at}; {small}", True)
    is_close = bits < SPARE_BITS
    text = f"{number} bits left{at}"
    return _Part("close" if is_close else "fits", text, is_close)


def _at(step):
    return "" if step is None else f", {format_moment(step, 'after')}"


def _window(reading, limits, of_weights):
    """Returns the range of loss scales, as powers of two, that suit gradients.

    Small weight gradients are ignored, because the log does not say which of
    them count.
    """
    if not reading or reading["largest"] is None:
        return None
    largest = [reading["largest"], (of_weights or {}).get("largest")]
    most = max(x for x in largest if x is not None)
    low = reading["low"]
    lowest = -math.inf if low is None else limits["subnormal_exponent"] - low
    return lowest, math.floor(limits["maximum_bits"] - SPARE_BITS - most)


def _is_empty(window):
    return window is not None and window[0] > window[1]


def _window_in_words(window):
    if window is None:
        return "not measured"
    if _is_empty(window):
        return "no loss scale fits"
    lowest, highest = window
    start = "up to" if lowest == -math.inf else f"2**{lowest} to"
    return f"{start} 2**{highest}"


def _plan(layers, judged, ranges, dtype, bad_input):
    """Returns the plan with the fewest layers in float32."""
    reasons, unmeasured = _reasons(layers, judged, ranges, dtype)
    costs = {x["path"]: flops(x) for x in layers}
    # The layers that the plan moves to float32 may have caused the skipped
    # steps.
    is_blamed = any(
        judged[x["path"]].refused and x["path"] in reasons and not x["repaired"]
        for x in layers
    )
    windows = {
        path: found.window
        for path, found in judged.items()
        if found.window and path not in reasons
    }
    scale = _best_scale(windows, costs, ranges, dtype, is_blamed)
    for path, (low, high) in windows.items():
        if not low <= scale <= high:
            do = "overflow" if high < scale else "vanish"
            at = f"at the loss scale 2**{scale}"
            reasons[path] = f"{at} its gradients {do} in {dtype}"
    wide = [f"{path} ({why})" for path, why in reasons.items()]
    count = format_count(len(wide), "layer")
    said = [f"{count} in float32: {format_names(wide, 4)}."]
    said = said if wide else ["No layer in float32."]
    if total := sum(costs.values()):
        held = sum(cost for path, cost in costs.items() if path not in reasons)
        said.append(f"{format_share(held / total)} of FLOPs in {dtype}.")
    if dtype == "float16":
        said.append(f"Loss scale 2**{scale}.")
        if (skipped := ranges["overflowing_scale"]) is not None:
            start = f"2**{math.ceil(skipped)}"
            said.append(
                f"The run skipped steps at loss scales from {start} up."
            )
            if scale >= skipped and not is_blamed:
                said.append("No lower loss scale is known to be enough.")
    if unmeasured:
        said.append(f"No finite reading: {format_names(unmeasured, 4)}.")
    text = " ".join(filter(None, [*said, left_out(bad_input)]))
    low, rows = f"mixed_{dtype}", []
    for path in costs:
        why = reasons.get(path)
        wide = {"policy": "float32", "reason": why}
        rows.append({"path": path} | (wide if why else {"policy": low}))
    about = {"format": "keras_mixprec.plan", "version": 1, "default": low}
    return {"text": text, "file": about | {"layers": rows}}


def _reasons(layers, judged, ranges, dtype):
    """Finds layers that need float32, and layers without a finite reading."""
    reasons: dict[str, str] = {}
    unmeasured = []
    mixed = any(not _began_wide(layer) for layer in layers)
    for layer in layers:
        path = layer["path"]
        own = judged[path]
        parts = {"activations": own.activation, "weights": own.weight}
        grave = [f"its {n}: {p.text}" for n, p in parts.items() if p.asks]
        feeders = layer.get("fed_by") or []
        over = (x for x in feeders if _is_beyond(judged, ranges, x, dtype))
        feeder, state = next(over, None), own.activation.state
        if mixed and _began_wide(layer):
            reasons[path] = "it was in float32 from the beginning of the run"
        elif grave or own.refused:
            reasons[path] = grave[0] if grave else own.refused
        elif feeder:
            beyond = f"beyond {dtype}"
            reasons[path] = f"its input from {feeder} is {beyond}"
        elif state in ("passed", "zero", "unknown"):
            unmeasured.append(path)
            if not (mixed or layer["passed_from"]):
                reasons[path] = "it was not measured"
    return reasons, unmeasured


def _is_beyond(judged, ranges, path, dtype):
    """Returns whether a layer's float32 output exceeds the format."""
    state = judged[path].activation.state if path in judged else ""
    # If outputs are infinite, a verdict may have the largest output in float32.
    largest = ranges["layers"].get(path, {}).get("in_float32", -math.inf)
    beyond = largest > format_limits(dtype)["maximum_bits"]
    return state == "overflows" or (state in ("lost", "unknown") and beyond)


def _best_scale(windows, costs, ranges, dtype, is_blamed):
    """Returns the loss scale that suits the layers with the most FLOPs."""
    # bfloat16 has the range of float32, so it needs no loss scale.
    if dtype != "float16":
        return 0
    possible, skipped = _SCALES, ranges["overflowing_scale"]
    # If no layer is to blame for skipped steps, the loss scale was too high.
    if skipped is not None and not is_blamed:
        below = [bits for bits in possible if bits < skipped]
        possible = below or possible[:1]
    needed = ranges["needed_scale"]
    usual = _USUAL_SCALE if needed is None else needed

    def score(bits):
        held = [p for p, (low, high) in windows.items() if low <= bits <= high]
        return sum(costs[path] for path in held), len(held), -abs(bits - usual)

    return max(possible, key=score)


def _began_wide(layer):
    # If the tuner demoted a layer before the first step, the layer was not in
    # float32 originally.
    return layer["dtypes"][0][1] == "float32" and layer["demoted_at"] is None


PARTS = ("activation", "gradient", "weight_gradient", "weight")

# The exponent under which histograms count infinities and NaNs.
_NONFINITE = 128

# Elements may become zero if the other elements keep this share of the sum of
# squares. The diagnosis uses the same limit for gradients.
KEPT_ENERGY = 0.99


def run_ranges(run, columns: int = MAX_COLUMNS) -> dict:
    """Returns the ranges of all layers of a run, ready for JSON.

    Args:
        run: `Run`.
        columns: Int. The maximum number of columns to read of each metric.

    Returns:
        Dict with

        - `"overflowing_scale"`: the least loss scale at which a step was
          skipped since dtypes last changed, as a power of two, or `None`;
        - `"needed_scale"`: the loss scale in the last verdict that names one;
        - `"layers"`: a dict by path. Each entry has a range by measured part,
          `"refused"`, the kinds of verdicts that each format does not repair,
          and `"in_float32"`, the logarithm of the largest float32 output in
          its last verdict.

        A range has `"largest"`, the logarithm of the largest magnitude, and
        `"low"`, the exponent of the smallest magnitude that counts, each with
        its step. Gradients do not include the loss scale.
    """
    begins = sorted(event["step"] for event in run.begins)
    layers = _since_calls(run.layers, begins)
    paths = {layer["path"] for layer in layers}
    found: dict = collections.defaultdict(dict)
    for part, name, row, step, value in _readings(run, layers, begins, columns):
        own = found[layer_of(row, paths)].setdefault(part, {**_UNREAD})
        sign = 1 if name == "largest" else -1
        if own[name] is None or sign * value > sign * own[name]:
            own |= {name: value, f"{name}_step": step}
    verdicts = run.of_kind("verdict")
    for verdict in verdicts:
        _add_verdict(found[verdict["layer"]], verdict)
    found.pop(None, None)
    needed = [v.get("numbers", {}).get("needed_bits") for v in verdicts]
    needed = [bits for bits in needed if isinstance(bits, int | float)]
    changed = max((s for x in layers for s, _ in x["dtypes"][1:]), default=-1)
    return {
        "layers": {path: own for path, own in found.items() if own},
        "overflowing_scale": _lowest_overflowing(run, changed),
        "needed_scale": needed[-1] if needed else None,
    }


_UNREAD = dict.fromkeys(("largest", "largest_step", "low", "low_step"))


def _readings(run, layers, begins, columns) -> Iterator[tuple]:
    """Yields part, `"largest"` or `"low"`, row, step and bits."""
    limit = _limits(layers)
    scale = _scale_bits(run.scale, begins)
    # Gradients of several optimizers cannot be unscaled, because the log does
    # not say which optimizer trains which layer.
    unknown = "gradient" if len(run.scale) > 1 else None
    for part in PARTS:
        grid = _grid(run, f"{part}_headroom_bits", columns)
        if part == unknown or grid is None:
            continue
        counts = _grid(run, f"{part}_nonfinite", columns)
        left = as_sent(grid.worst)
        left[~np.isfinite(left)] = np.nan
        if counts is not None and counts.worst.shape == left.shape:
            left[counts.worst > 0] = np.nan
        steps = grid.last.tolist()
        shift = scale if part == "gradient" else lambda step: 0.0
        largest = np.array([limit(s) - shift(s) for s in steps]) - left
        rows = np.flatnonzero(~np.isnan(largest).all(axis=1))
        places = np.nanargmax(largest[rows], axis=1)
        for row, place in zip(rows, places, strict=True):
            value = round(largest[row, place].item(), 3)
            yield part, "largest", grid.layers[row], steps[place], value
    for row in run.histogram_rows():
        part, step = row["part"], row["step"]
        low = smallest_that_counts(row["exponents"], row["counts"])
        if low is not None and part != unknown:
            low -= scale(step) if part == "gradient" else 0
            yield part, "low", row["layer"], step, round(float(low), 3)


def smallest_that_counts(exponents, counts) -> int | None:
    """Returns the smallest exponent that is needed to keep `KEPT_ENERGY`.

    Args:
        exponents: List of ints, rising.
        counts: List of ints, the number of magnitudes at each exponent.

    Returns:
        Int, `None` if there are no finite numbers.
    """
    finite = [
        (exponent, count)
        for exponent, count in zip(exponents, counts, strict=True)
        if count > 0 and exponent < _NONFINITE
    ]
    if not finite:
        return None
    # Use a loop, because NumPy takes five times as long for 40 numbers.
    top = finite[-1][0]
    energies = [count * 4.0 ** (e - top) for e, count in finite]
    wanted, kept = KEPT_ENERGY * sum(energies), 0.0
    for (exponent, _), energy in zip(finite[::-1], energies[::-1], strict=True):
        kept += energy
        if kept >= wanted:
            return exponent
    return finite[0][0]


def _limits(layers):
    """Returns a function from a step to the format maximum at that step."""
    changes = sorted({since for x in layers for since, _ in x["dtypes"]})
    limits = []
    for since in changes or [0]:
        then = [{"compute_dtype": dtype_at(x, since + 1)} for x in layers]
        limits.append(format_limits(measured_against(then))["maximum_bits"])

    def limit(step):
        return limits[max(bisect.bisect_left(changes, step) - 1, 0)]

    return limit


def _since_calls(layers, begins):
    """Returns the table of layers, with dtypes from the start of each `fit`.

    A later call to `fit` logs its table one step too late.
    """

    def since(step):
        return step - 1 if step - 1 in begins else step

    return [
        layer | {"dtypes": [[since(s), d] for s, d in layer["dtypes"]]}
        for layer in layers
    ]


def _scale_bits(courses, begins):
    """Returns a function from a step to the loss scale, as a power of two.

    A call to `fit` without a loss scale does not inherit the scale of an
    earlier call.
    """
    course = courses[0] if courses else {"steps": [], "scale": []}
    steps, scales = course["steps"], course["scale"]

    def bits(step):
        if not steps:
            return 0.0
        # A step changes the scale of the next step, so look one step back.
        place = max(bisect.bisect_right(steps, step - 1) - 1, 0)
        call = bisect.bisect_right(begins, step - 1) - 1
        if call >= 0 and steps[place] < begins[call]:
            return 0.0
        scale = scales[place]
        return math.log2(scale) if 0 < scale < math.inf else 0.0

    return bits


def _add_verdict(own, verdict):
    """Adds the formats that a verdict rules out, and its largest output."""
    kind = kind_of(verdict["verdict"])
    for dtype in CHOICES if kind.repaired_by else ():
        kinds = own.setdefault("refused", {}).setdefault(dtype, [])
        if kind.name not in kinds and not is_repaired(kind.name, dtype):
            kinds.append(kind.name)
    largest = verdict.get("numbers", {}).get("largest_output_in_float32")
    if isinstance(largest, int | float) and 0 < largest < math.inf:
        own["in_float32"] = math.log2(largest)


def _lowest_overflowing(run, since):
    """Returns the lowest loss scale at which only gradients were non-finite.

    Non-finite losses and inputs do not depend on the scale. Steps up to `since`
    had other dtypes.
    """
    scales = [
        event["scale"]
        for event in run.of_kind("skipped_step")
        if not (event.get("bad_input") or event.get("loss"))
        and moment(event) > since
        and isinstance(event.get("scale"), int | float)
        and 0 < event["scale"] < math.inf
    ]
    return math.log2(min(scales)) if scales else None


def _grid(run, metric, columns):
    try:
        return run.grid(metric, columns)
    except KeyError:
        return None
