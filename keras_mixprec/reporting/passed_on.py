"""What made layers infinite or NaN that are not to blame themselves.

All layers behind one that overflows are not finite, and so are all gradients
where the loss is not: a verdict names the one that is to blame. Where training
diverged or weights were lost, no layer is.
"""

import collections
import itertools
import math
from typing import NamedTuple

import numpy as np

from keras_mixprec.reporting.facts import has_diverged
from keras_mixprec.reporting.format_limits import is_wider
from keras_mixprec.reporting.grid import Grid
from keras_mixprec.reporting.layer_tables import layer_of
from keras_mixprec.reporting.schema import FED_BY

_FORWARD = ("forward_overflow", "cast_overflow", "weight_overflow")
_BACKWARD = ("backward_overflow",)
# The parts of layers, as the names of metrics begin.
_PARTS = (
    ("activation_", "activation"),
    ("gradient_", "gradient"),
    ("weight_gradient_", "gradient"),
    ("weight_", "weight"),
)


def add_passed_on(layers: list, events: list):
    """Adds from which layer each would have received what is not finite.

    `"passes_on"` is a dict of paths by part, `"activation"` and `"gradient"`,
    without those parts in which a layer has a verdict of its own, or none is
    before it that does. Whether anything was not finite is another matter.

    Args:
        layers: List of dicts, the table of layers in the order of the model.
        events: List of dicts.
    """
    paths = [layer["path"] for layer in layers]
    culprits = [_culprits(events, kinds) for kinds in (_FORWARD, _BACKWARD)]
    forward, backward = ([p for p in paths if p in own] for own in culprits)
    to_blame = {*forward, *backward}
    if all(FED_BY in layer for layer in layers):
        fed_by = {layer["path"]: layer[FED_BY] for layer in layers}
        activation = _reached(forward, _behind(_with_inherited(fed_by)))
        gradient = _reached(backward, _before(fed_by))
    else:
        activation = _later(forward, paths)
        gradient = _later(backward, paths[::-1])
    if forward:  # The loss is not finite, so no gradient is.
        gradient = dict.fromkeys(paths, forward[0]) | gradient
    parts = {"activation": activation, "gradient": gradient}
    for layer in layers:
        path = layer["path"]
        found = {name: own.get(path) for name, own in parts.items()}
        layer["passes_on"] = {
            name: origin
            for name, origin in found.items()
            if origin not in (None, path) and path not in to_blame
        }


def add_origins(layers: list, limit: str):
    """Adds which layer made what in the table of layers is not finite or zero.

    `"passed_from"` is the path of the layer that `"passes_on"` names for
    activations, if the worst of both since dtypes last changed is not finite,
    or all zero; else `None`.

    Args:
        layers: List of dicts, the table of layers, with headroom.
        limit: String. The dtype that headroom refers to.
    """
    by_path = {layer["path"]: layer for layer in layers}
    for layer in layers:
        origin = by_path.get(layer["passes_on"].get("activation"))
        layer["passed_from"] = None
        if origin is None or is_wider(origin["compute_dtype"], limit):
            continue
        made = _outputs(layer)
        if made == _outputs(origin) and abs(made or 0) == math.inf:
            layer["passed_from"] = origin["path"]


def fault_of_the_run(events: list) -> dict | None:
    """Returns what makes layers infinite or NaN that are all not to blame.

    Args:
        events: List of dicts.

    Returns:
        Dict with `"because"`, a clause, and `"since"`, the first step that is
        known to have failed; `None` if no verdict says so.
    """
    found = [
        (event, because)
        for event in events
        if event["kind"] == "verdict"
        and event["layer"] is None
        and (because := _of_the_run(event))
    ]
    if not found:
        return None
    # That weights are lost comes of a divergence.
    because = max(found, key=lambda pair: pair[0]["verdict"] == "divergence")[1]
    return {"because": because, "since": min(_since(e) for e, _ in found)}


def _of_the_run(verdict):
    if verdict["verdict"] == "weights_lost":
        return "weights were lost"
    if verdict["verdict"] != "divergence":
        return None
    diverged = has_diverged(verdict)
    return "training diverged" if diverged else "float32 fails as well"


def _since(verdict):
    since = verdict.get("failing_since")
    at = verdict.get("at_step", verdict["step"])
    return at if since is None else since


def add_lost(layers: list, events: list):
    """Adds why a layer is infinite or NaN without any being to blame.

    `"lost_because"` is the clause of `fault_of_the_run`, if the worst of its
    activations since dtypes last changed is not finite, and nothing says that
    it or another layer made them so; else `None`.

    Args:
        layers: List of dicts, as `add_origins` leaves them.
        events: List of dicts.
    """
    fault = fault_of_the_run(events)
    because = fault["because"] if fault else None
    to_blame = _culprits(events, _FORWARD + _BACKWARD)
    for layer in layers:
        is_lost = (
            layer["path"] not in to_blame
            and layer["passed_from"] is None
            and _outputs(layer) == -math.inf
        )
        layer["lost_because"] = because if is_lost else None


def passed_in_words(layer: dict) -> dict | None:
    """Returns what is not a layer's own doing, in a long and a short form.

    Args:
        layer: Dict, as `add_lost` leaves it.
    """
    origin = {"layer": layer["passed_from"], "because": layer["lost_because"]}
    if not any(origin.values()):
        return None
    return _in_words(origin, _outputs(layer) == math.inf)


def _in_words(origin, is_zero):
    if because := origin.get("because"):
        return {
            "long": f"infinite or NaN because {because}: no fault of the layer",
            "short": f"not finite: {because}",
        }
    path = origin["layer"]
    if is_zero:
        short = f"all zero: comes from {path}"
        return {"long": f"{short}, which has a verdict", "short": short}
    short = f"not finite: comes from {path}"
    return {"long": f"{short}, which has a verdict", "short": short}


def _outputs(layer):
    """The least headroom of what it returns, whatever overflows inside."""
    inside = layer["inside"] or {}
    return inside.get("outputs", layer["least_headroom"])


class PassedCells(NamedTuple):
    """Where a metric shows what a layer did not make itself.

    Attributes:
        origins: List of dicts, `{"layer": path}` of the layer that made it, or
            `{"because": clause}` where that is the run as a whole; of what is
            all zero with `"zero"`.
        cells: Integer array `[layers, columns]`, the place of an origin in the
            list, or -1.
    """

    origins: list
    cells: np.ndarray

    def in_words(self) -> list[dict]:
        """Returns what each origin is, in a `"long"` and a `"short"` form."""
        return [_in_words(origin, "zero" in origin) for origin in self.origins]


def passed_cells(
    grid: Grid, metric: str, layers: list, events: list
) -> PassedCells:
    """Returns where layers show what they did not make themselves.

    Infinities and NaNs are passed on, and outputs that are all zero. Gradients
    that are zero may have vanished on their own.

    Args:
        grid: `Grid` of the metric.
        metric: String.
        layers: List of dicts, the table of layers.
        events: List of dicts.
    """
    found = PassedCells([], np.full(grid.worst.shape, -1, "i4"))
    part = next((p for start, p in _PARTS if metric.startswith(start)), None)
    if part is None:
        return found
    by_path = {layer["path"]: layer for layer in layers}
    paths = [layer_of(call, by_path) for call in grid.layers]
    rows = collections.defaultdict(list)
    for row, path in enumerate(paths):
        rows[path].append(row)
    is_count = metric.endswith("_nonfinite")
    lost = grid.worst > 0 if is_count else grid.worst == -np.inf
    has_zeros = part == "activation" and not is_count
    zero = (grid.worst == np.inf) & has_zeros
    _mark_fault(found, lost, part, grid.last, paths, events)
    for row, path in enumerate(paths):
        origin = by_path.get(path, {}).get("passes_on", {}).get(part)
        if origin in rows:
            before = rows[origin]
            for more, kind in ({}, lost), ({"zero": True}, zero):
                made = (kind[before] & kind[row]).any(axis=0)
                _mark(found, {"layer": origin} | more, row, made)
    return found


def _mark_fault(found, lost, part, last, paths, events):
    fault = fault_of_the_run(events)
    if fault is None:
        return
    # Gradients of before may have overflowed in a search for the loss scale.
    late = last >= (fault["since"] if part == "gradient" else 0)
    to_blame = _culprits(events, _FORWARD + _BACKWARD)
    for row, path in enumerate(paths):
        if path not in to_blame:
            origin = {"because": fault["because"]}
            _mark(found, origin, row, lost[row] & late)


def _mark(found, origin, row, columns):
    if columns.any():
        if origin not in found.origins:
            found.origins.append(origin)
        found.cells[row, columns] = found.origins.index(origin)


def _culprits(events, kinds):
    return {
        event["layer"]
        for event in events
        if event["kind"] == "verdict"
        and event["verdict"] in kinds
        and "overflows_in_steps" not in event.get("numbers", {})
    }


def _holders(path):
    """`a/b/c` is in `a` and in `a/b`; the innermost first."""
    folders = path.split("/")[:-1]
    return [*itertools.accumulate(folders, "{}/{}".format)][::-1]


def _with_inherited(fed_by):
    """A layer that is called inside another is fed by what feeds that one.

    A log has no feeders of what is called in a layer's own `call`.
    """
    return {
        path: own or next(filter(None, map(fed_by.get, _holders(path))), [])
        for path, own in fed_by.items()
    }


def _behind(fed_by):
    """By path, what a layer feeds, and what it is in."""
    edges = {path: _holders(path) for path in fed_by}
    for path, feeders in fed_by.items():
        for feeder in feeders:
            edges.setdefault(feeder, []).append(path)
    return edges


def _before(fed_by):
    return {path: [*own, *_holders(path)] for path, own in fed_by.items()}


def _reached(sources, edges):
    """From which source each is reached first, over the fewest edges."""
    origins = {source: source for source in sources}
    queue = collections.deque(sources)
    while queue:
        path = queue.popleft()
        for reached in edges.get(path, ()):
            if reached not in origins:
                origins[reached] = origins[path]
                queue.append(reached)
    return origins


def _later(sources, paths):
    """Without a graph: the last source before each in the model's order."""
    sources, origins, last = {*sources}, {}, None
    for path in paths:
        last = path if path in sources else last
        origins[path] = last
    return origins
