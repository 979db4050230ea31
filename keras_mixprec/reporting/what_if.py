"""What the layers of a run would do in another format, and a plan from that.

Of the range of each layer's numbers over the run alone: ranges are of what
layers return, and do not say where digits are lost.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

from keras_mixprec.formats import (
    format_count,
    format_digits,
    format_moment,
    format_names,
    format_share,
)
from keras_mixprec.reporting.event_rows import words
from keras_mixprec.reporting.facts import dtype_at
from keras_mixprec.reporting.format_limits import (
    CHOICES,
    SPARE_BITS,
    format_limits,
)

# What a plan can hold; the others are set by Keras' `quantize`.
_PLANNED = ("float16", "bfloat16")

# The loss scales to choose from, as powers of two, and what Keras starts at.
_SCALES = (-14, 126)
_USUAL_SCALE = 15

# The states of a layer, the gravest first, with how grave and what is said.
_STATES = {
    "overflows": ("bad", "would overflow"),
    "lost": ("bad", "not finite in this run"),
    "refused": ("bad", "with a verdict of the run"),
    "no scale": ("bad", "no loss scale would fit"),
    "vanishes": ("warning", "would lose small numbers that count"),
    "close": ("warning", f"within {SPARE_BITS} bits of overflowing"),
    "passed": (None, "not known: not finite through no fault of theirs"),
    "unknown": (None, "not measured"),
    "zero": (None, "with zeros alone"),
    "fits": (None, "would fit"),
}
_ORDER = [*_STATES]

# A run that fails in float32 as well says nothing of what a format would do.
_NO_MATTER = {
    "divergence": "No plan: training diverged in float32 too, so precision is "
    "not the cause, and these ranges say nothing about a run that does not "
    "diverge.",
    "weights_lost": "No plan: weights are infinite or NaN, so these ranges say "
    "nothing about a run with finite ones. Restore a checkpoint first.",
}


class _Part(NamedTuple):
    """What the numbers of a part of a layer would do in a format.

    `bits` is the headroom that is left, `lost` the dtype in which they were
    not finite.
    """

    state: str
    bits: float = math.nan
    step: int | None = None
    lost: str | None = None


class _Judged(NamedTuple):
    """The parts of a layer in a format, the gravest of them, and verdicts.

    `window` are the lowest and the highest loss scale, as powers of two, at
    which gradients neither vanish nor overflow.
    """

    state: str
    activation: _Part
    weight: _Part
    window: tuple[float, int] | None
    refused: list


def what_if(overview: dict, ranges: dict) -> dict:
    """Returns what each layer would do in each format, and the smallest plan.

    Args:
        overview: Dict, as `RunData.overview` returns it.
        ranges: Dict, as `run_ranges` returns it.

    Returns:
        Dict with `"run"`; `"measured"`, whether there are any ranges; and
        `"formats"`, by name a dict of `"layers"` and `"plan"`. Layers are a
        list of dicts, the gravest first, with `"path"`, `"state"`, the same in
        words as `"said"`, and `"activations"`, `"gradients"` and `"weights"`,
        each in words with its level. A plan is a dict of `"text"` and of
        `"file"`, what `PrecisionPlan.load` reads, `None` if there is no plan.
    """
    formats = {}
    for dtype in CHOICES:
        rows = [_row(x, ranges, dtype) for x in overview["layers"]]
        rows.sort(key=lambda row: _ORDER.index(row["state"]))
        plan = _plan(overview, ranges, dtype)
        formats[dtype] = {"layers": rows, "plan": plan}
    measured = bool(ranges["layers"])
    return {"run": overview["run"], "measured": measured, "formats": formats}


def _row(layer, ranges, dtype):
    path, name = layer["path"], dtype
    own = _with_lost(ranges["layers"].get(path, {}), layer)
    found = _judged(own, dtype)
    state, activation = found.state, found.activation
    if activation.state == "unknown":
        zero, passed = layer["least_headroom"] == math.inf, layer["passed"]
        why = "zero" if zero else "passed" if passed else None
        activation = activation._replace(state=why or "unknown")
        state = why or state if state == "unknown" else state
    texts = {
        "activations": _part_in_words(activation, name, layer["passed"]),
        "gradients": _window_in_words(found.window),
        "weights": _part_in_words(found.weight, name)
        if layer.get("parameters") != 0
        else "none",
    }
    levels = {
        "activations": _STATES[activation.state][0],
        "gradients": "bad" if _is_empty(found.window) else None,
        "weights": _STATES[found.weight.state][0],
    }
    if found.refused and levels["activations"] != "bad":
        texts["activations"] = _found_in_words(found.refused)
        levels["activations"] = "bad"
    if state == "overflows" and activation.lost:
        state = "lost"
    level, said = _STATES[state]
    cells = {n: {"text": texts[n], "level": levels[n]} for n in texts}
    return {"path": path, "state": state, "said": said, "level": level} | cells


def _with_lost(own, layer):
    """With what a layer's row says of one that was not finite by itself."""
    if layer["lost_because"]:
        return own | {"nonfinite": None}
    is_lost = layer["least_headroom"] == -math.inf and not layer["passed"]
    if not is_lost or own.get("nonfinite"):
        return own
    step = layer["worst_step"]
    return own | {"nonfinite": {"step": step, "dtype": dtype_at(layer, step)}}


def _judged(own, dtype):
    limits = format_limits(dtype)
    activation = _judged_part(own.get("activation"), limits)
    if lost := own.get("nonfinite"):
        most = format_limits(lost["dtype"])["maximum_bits"]
        largest = (own.get("activation") or {}).get("largest")
        # How large what became infinite was only a wider dtype says.
        if largest is None or largest <= most:
            state = "overflows" if limits["maximum_bits"] <= most else "unknown"
            activation = _Part(state, math.nan, lost["step"], lost["dtype"])
    weight = _judged_part(own.get("weight"), limits)
    window = _window(own.get("gradient"), limits, own.get("weight_gradient"))
    refused = own.get("refused", {}).get(dtype, [])
    states = {activation.state, weight.state}
    states |= {"refused"} if refused else set()
    states |= {"no scale"} if _is_empty(window) else set()
    grave = [x for x in _ORDER[: _ORDER.index("passed")] if x in states]
    state = grave[0] if grave else activation.state
    return _Judged(state, activation, weight, window, refused)


def _judged_part(reading, limits):
    if not reading or reading["largest"] is None:
        return _Part("unknown")
    bits, low = limits["maximum_bits"] - reading["largest"], reading["low"]
    vanishes = low is not None and low < limits["subnormal_exponent"]
    state = "fits" if bits >= SPARE_BITS else "close"
    state = "overflows" if bits < 0 else "vanishes" if vanishes else state
    return _Part(state, bits, reading["largest_step"])


def _window(reading, limits, of_weights):
    """The loss scales, as powers of two, that gradients fit.

    As the diagnosis has them, but that of the gradients of weights the log
    does not know which small ones count.
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


def _part_in_words(part, name, passed=None):
    state, bits, step, lost = part
    at = "" if step is None else f", {format_moment(step, 'after')}"
    if state in ("passed", "zero"):
        known = passed["short"] if passed else "all values are zero"
        return known + ": not known" * (state == "passed")
    if lost:
        unknown = f"not finite in {lost}{at}: not known"
        return f"not finite{at}" if state == "overflows" else unknown
    if state == "unknown":
        return "not measured"
    number = format_digits(round(abs(bits), 1))
    if state == "overflows":
        return f"overflow: {number} bits beyond {name}{at}"
    more = "; small ones that count become 0" * (state == "vanishes")
    return f"{number} bits left{at}{more}"


def _window_in_words(window):
    if window is None:
        return "not measured"
    if _is_empty(window):
        return "no loss scale fits"
    lowest, highest = window
    start = "up to" if lowest == -math.inf else f"2**{lowest} to"
    return f"{start} 2**{highest}"


def _found_in_words(kinds):
    # A layer may overflow on the way to an output that does not.
    return f"the run found {', '.join(map(words, kinds))} in it"


def _plan(overview, ranges, dtype):
    """The fewest layers in float32 with which nothing leaves a format."""
    finding = overview["finding"]
    if dtype not in _PLANNED:
        set_by = "is set by Keras' quantize"
        how = "needs none" if dtype == "float32" else set_by
        text = f"A plan holds {' and '.join(_PLANNED)}: {dtype} {how}."
        return {"text": text, "file": None}
    if finding and not finding["repaired"]:
        kind = overview["events"][finding["event"]].get("verdict")
        if kind in _NO_MATTER:
            return {"text": _NO_MATTER[kind], "file": None}
    search = _Search(overview, ranges, dtype)
    return {"text": search.text(), "file": search.file()}


class _Search:
    """Which layers need float32, each with why, and the loss scale."""

    def __init__(self, overview, ranges, dtype):
        self._dtype = dtype
        self._layers = layers = overview["layers"]
        self._left_out = overview["bad_input"]
        self._own = ranges["layers"]
        self._judged = {
            x["path"]: _judged(self._own.get(x["path"], {}), dtype)
            for x in layers
        }
        self._reasons: dict[str, str] = {}
        self._unmeasured: list[str] = []
        # Layers that pass on what another made infinite, by that one.
        self._behind: dict[str, list] = defaultdict(list)
        self._find_reasons()
        self._find_scale(ranges)

    def _find_reasons(self):
        mixed = any(not _began_wide(layer) for layer in self._layers)
        refused = [bool(x.refused) for x in self._judged.values()]
        cause = refused.index(True) if any(refused) else math.inf
        for place, layer in enumerate(self._layers):
            path = layer["path"]
            own = self._judged[path]
            feeders = layer.get("fed_by") or []
            feeder = next((x for x in feeders if self._is_beyond(x)), None)
            known = own.activation.state != "unknown" or own.activation.lost
            # Zeros behind a layer that a verdict names may be its doing.
            zero = layer["least_headroom"] == math.inf and place <= cause
            if mixed and _began_wide(layer):
                why = "it was in float32 from the beginning of the run"
            elif why := self._reason_of(own):
                pass
            elif own.refused:
                why = _found_in_words(own.refused)
            elif feeder:
                why = (
                    f"it receives what {feeder} computes, beyond {self._dtype}"
                )
            elif known:
                continue
            elif layer["passed_from"]:
                self._behind[layer["passed_from"]].append(path)
                continue
            elif zero:
                why = "its activations were all zero, which have no range"
            else:
                self._unmeasured.append(path)
                if mixed:
                    continue
                why = "nothing was measured of it"
            self._reasons[path] = why

    def _is_beyond(self, path):
        """Whether what a layer returns is beyond the format in float32."""
        if path not in self._judged:
            return False
        state, *_, lost = self._judged[path].activation
        if not lost:
            return state == "overflows"
        # A verdict may say how large it is.
        largest = self._own[path].get("in_float32", -math.inf)
        return largest > format_limits(self._dtype)["maximum_bits"]

    def _reason_of(self, own):
        name = self._dtype
        for what, part in (
            ("activations", own.activation),
            ("weights", own.weight),
        ):
            state, bits, step, lost = part
            at = "" if step is None else f" {format_moment(step, 'after')}"
            if lost:
                unknown = ": how large is not known" * (state == "unknown")
                return f"its {what} were not finite in {lost}{at}{unknown}"
            if state == "overflows":
                by = format_digits(-bits)
                return f"its {what} exceed {name} by {by} bits{at}"
            if state == "close":
                left = format_digits(bits)
                return f"its {what} have {left} bits left in {name}{at}"
            if state == "vanishes":
                return f"small {what} that count become 0 in {name}"
        return None

    def _find_scale(self, ranges):
        """The loss scale that suits the layers with the most FLOPs."""
        self._overflowing = ranges["overflowing_scale"]
        windows = {
            x["path"]: window
            for x in self._layers
            if x["path"] not in self._reasons
            and (window := self._judged[x["path"]].window)
        }
        # What is in float32 by this plan may have skipped those steps, unless
        # it was already: steps are those since dtypes last changed.
        self._is_blamed = any(
            self._judged[x["path"]].refused
            and x["path"] in self._reasons
            and not x["repaired"]
            for x in self._layers
        )
        costs = {x["path"]: x["share_of_flops"] or 0 for x in self._layers}
        usual = ranges["needed_scale"]
        usual = _USUAL_SCALE if usual is None else usual

        def score(bits):
            held = [p for p, (low, high) in windows.items()
                    if low <= bits <= high]  # fmt: skip
            return sum(costs[p] for p in held), len(held), -abs(bits - usual)

        self._scale = scale = max(self._possible_scales(), key=score)
        for path, (low, high) in windows.items():
            if not low <= scale <= high:
                do = "overflow" if high < scale else "vanish"
                self._reasons[path] = (
                    f"at the loss scale 2**{scale} its gradients {do} in "
                    f"{self._dtype}"
                )
        held = sum(c for p, c in costs.items() if p not in self._reasons)
        total = sum(costs.values())
        self._share = held / total if total else None

    def _possible_scales(self):
        # A format as wide as float32 needs no loss scale.
        if self._dtype != "float16":
            return [0]
        first, last = _SCALES
        # A plan stays below where gradients overflowed in the run without a
        # layer that is to blame.
        if self._overflowing is not None and not self._is_blamed:
            last = min(last, math.ceil(self._overflowing) - 1)
        return range(first, max(first, last) + 1)

    def text(self):
        wide = [f"{p} ({why})" for p, why in self._reasons.items()]
        count = format_count(len(wide), "layer")
        said = [
            f"{count} in float32: {format_names(wide, 4)}."
            if wide
            else "No layer in float32."
        ]
        if self._share is not None:
            said.append(
                f"{format_share(self._share)} of FLOPs in {self._dtype}."
            )
        said.append(self._scale_in_words())
        for path, own in self._behind.items():
            said.append(f"Not known, behind {path}: {format_names(own, 4)}.")
        if self._unmeasured:
            named = format_names(self._unmeasured, 4)
            said.append(f"Without a finite reading: {named}.")
        said.append(left_out(self._left_out))
        return " ".join(filter(None, said))

    def _scale_in_words(self):
        if self._dtype != "float16":
            return ""
        advised = f"Loss scale 2**{self._scale}"
        if self._overflowing is None:
            return f"{advised}."
        start = f"2**{math.ceil(self._overflowing)}"
        if self._is_blamed:
            return (
                f"{advised}; the run skipped steps from {start} on, which may "
                "be due to the layers with a verdict."
            )
        if self._scale < self._overflowing:
            return f"{advised}: from {start} on the run skipped steps."
        return f"No loss scale is known: the run skipped steps even at {start}."

    def file(self):
        """As `PrecisionPlan.load` reads it."""
        low = f"mixed_{self._dtype}"
        layers: list[dict[str, Any]] = []
        for layer in self._layers:
            path = layer["path"]
            why = self._reasons.get(path)
            wide = {"policy": "float32", "reason": why}
            layers.append({"path": path} | (wide if why else {"policy": low}))
        about = {"format": "keras_mixprec.plan", "version": 1, "default": low}
        return about | {"layers": layers}


def left_out(steps: list) -> str:
    """Returns which readings are left out, empty if none are.

    Args:
        steps: List of ints, at which the input was not finite.
    """
    if not steps:
        return ""
    of = "steps" if steps[1:] else "step"
    named = format_names((f"{step:,}" for step in steps), 4)
    return (
        f"The input was not finite at {of} {named} (bad data): what it made "
        "infinite or NaN is not counted, since no format mends it."
    )


def _began_wide(layer):
    # The tuner may demote a layer before the first step.
    return layer["dtypes"][0][1] == "float32" and layer["demoted_at"] is None
