"""Which layer made what others only pass on: infinities and NaNs.

All layers behind one that overflows are not finite, and so are all gradients
where the loss is not: a verdict names the one that is to blame.
"""

import collections
import itertools
import math

import numpy as np

from keras_mixprec.reporting.format_limits import is_wider
from keras_mixprec.reporting.layer_tables import layer_of
from keras_mixprec.reporting.schema import FED_BY

_FORWARD = ("forward_overflow", "cast_overflow", "weight_overflow")
_BACKWARD = ("backward_overflow",)


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
        activation = _reached(forward, _behind(fed_by))
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


def _outputs(layer):
    """The least headroom of what it returns, whatever overflows inside."""
    inside = layer["inside"] or {}
    return inside.get("outputs", layer["least_headroom"])


def passed_cells(calls: list, worst: np.ndarray, layers: list) -> np.ndarray:
    """Returns where a layer passes on what another made, of its activations.

    Args:
        calls: List of strings, the rows: calls of layers.
        worst: Array `[calls, steps]`, headrooms, minus infinity where numbers
            were not finite, infinity where all were zero.
        layers: List of dicts, the table of layers.

    Returns:
        Boolean array like `worst`.
    """
    by_path = {layer["path"]: layer for layer in layers}
    paths = [layer_of(call, by_path) for call in calls]
    rows = collections.defaultdict(list)
    for row, path in enumerate(paths):
        rows[path].append(row)
    passed = np.zeros(worst.shape, bool)
    for row, path in enumerate(paths):
        origin = by_path.get(path, {}).get("passes_on", {}).get("activation")
        if origin in rows:
            alike = (worst[rows[origin]] == worst[row]).any(axis=0)
            passed[row] = np.isinf(worst[row]) & alike
    return passed


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
