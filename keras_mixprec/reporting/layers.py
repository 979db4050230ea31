"""The layers of a run: dtypes, findings, and which layer is to blame.

Non-finite numbers spread: from an overflowing layer to all layers after it, and
from a non-finite loss to all gradients. A verdict names the layer to blame. No
layer is to blame if training diverged or weights were lost.
"""

import collections
import itertools
import math
from collections.abc import Iterable

import numpy as np

from keras_mixprec.formats import format_bits, format_moment
from keras_mixprec.reporting.event_kinds import is_layer
from keras_mixprec.reporting.facts import (
    all_changes,
    dtype_now,
    has_diverged,
    is_repaired,
    kind_of,
    moment,
)
from keras_mixprec.reporting.format_limits import (
    SPARE_BITS,
    format_limits,
    is_wider,
    measured_against,
)
from keras_mixprec.reporting.headline import over_by
from keras_mixprec.reporting.layer_tables import Grid, as_sent, layer_of
from keras_mixprec.reporting.run_files import is_step
from keras_mixprec.reporting.schema import FED_BY
from keras_mixprec.reporting.told import mark_of, words
from keras_mixprec.verdict_kinds import KINDS

# The keys of the least headroom of a layer and of its step, by part.
_LEAST = {
    "activation": ("least_headroom", "worst_step"),
    "gradient": ("least_gradient_headroom", "worst_gradient_step"),
}
_INSIDE = "largest_inside_in_float32"
_FORWARD = ("forward_overflow", "cast_overflow", "weight_overflow")
_BACKWARD = ("backward_overflow",)


def read_layers(rows: Iterable) -> list[dict]:
    """Returns the last table of layers.

    Args:
        rows: Dicts, the table at the start and after each change.

    Returns:
        List of dicts. In each, `"dtypes"` is a list of pairs: a step, and the
        compute dtype after that step.
    """
    history: dict = {}
    table: list = []
    for row in rows:
        step, layers = row.get("step"), row.get("layers")
        if not is_step(step) or not isinstance(layers, list):
            continue
        table = [_with_feeders(layer) for layer in layers if is_layer(layer)]
        for layer in table:
            dtypes = history.setdefault(layer["path"], [])
            if not dtypes or dtypes[-1][1] != layer["compute_dtype"]:
                dtypes.append([step, layer["compute_dtype"]])
    return [layer | {"dtypes": history[layer["path"]]} for layer in table]


def _with_feeders(layer):
    """Removes damaged feeders from a row."""
    feeders = layer.get(FED_BY)
    if isinstance(feeders, list) and all(isinstance(x, str) for x in feeders):
        return layer
    return {name: value for name, value in layer.items() if name != FED_BY}


def layers_of(table: list, events: list, tables: list) -> list[dict]:
    """Returns the table of layers, with all logged facts about each layer.

    Args:
        table: List of dicts from `read_layers`.
        events: List of dicts, by rising step.
        tables: List of `Table`, the measurements.

    Returns:
        List of dicts, with the keys that `docs/files.md` describes.
    """
    limit = measured_against(table)
    changes = all_changes(events)
    rows = [row | _changed(row, changes[row["path"]]) for row in table]
    over = over_by(events, table)
    found = collections.defaultdict(list)
    for event in events:
        if event["kind"] == "verdict":
            found[event["layer"]].append(event)
    passes = passes_on(table, events)
    least = _least_headroom(rows, tables)
    rows = [
        row
        | _findings(found[row["path"]], over)
        | _headroom(row, least, found[row["path"]], limit)
        | {"passes_on": passes[row["path"]]}
        for row in rows
    ]
    by_path = {row["path"]: row for row in rows}
    fault, to_blame = fault_of_the_run(events), _culprits(events)
    because = fault["because"] if fault else None
    rows = [
        row
        | _blame(row, by_path, limit, row["path"] not in to_blame and because)
        for row in rows
    ]
    shown = [row | {"headroom": _shown(row, limit)} for row in rows]
    known = [x["headroom"] for x in shown if x["headroom"]]
    known.sort(key=lambda x: (_ORDER.index(x["level"]), x["bits"]))
    for rank, headroom in enumerate(known):
        headroom["rank"] = rank
    return [x | {"is_problem": _is_problem(x)} for x in shown]


# The levels of headroom, the most severe first.
_ORDER = ("bad", "passed", "warning", "quiet", "roomy", "beyond", "zero")


def _shown(row, limit):
    """Returns headroom as tables show it, or `None` if not measured."""
    bits, dtype = row["least_headroom"], row["compute_dtype"]
    if bits is None:
        return None
    own, wider = bits, is_wider(dtype, limit)
    if wider:
        above = [format_limits(x)["maximum_bits"] for x in (dtype, limit)]
        own += above[0] - above[1]
    level = _level(bits, wider)
    texts = {"beyond": f"beyond {limit}", "zero": "all zero"}
    text = texts.get(level) or left_in_words(own)
    title = text
    if wider and abs(bits) < math.inf:
        how = "if it were" if bits > 0 else "beyond"
        other = f"{format_bits(abs(bits))} {how} {limit}"
        title = f"{format_bits(own)} left in {dtype}, {other}"
    title += f" {format_moment(row['worst_step'], 'after')}"
    if inside := row["inside"]:
        text = "▲ " * inside["is_open"] + inside["short"]
        title = inside["long"]
    if passed := row["passed"]:
        level, text, title = "passed", passed["short"], passed["long"]
    return {"bits": own, "level": level, "text": text, "title": title}


def _level(bits, wider):
    """Returns the level of headroom. A wider dtype may exceed the limit."""
    if bits == math.inf:
        return "zero"
    if wider and bits > -math.inf:
        return "roomy" if bits > 0 else "beyond"
    return "bad" if bits <= 0 else "warning" if bits < SPARE_BITS else "quiet"


def _is_problem(row):
    """Returns whether a layer still needs attention."""
    if row["verdicts"] and not row["repaired"]:
        return True
    if not row["headroom"] or row["lost_because"]:
        return False
    return row["headroom"]["level"] in ("bad", "passed", "warning", "zero")


def _changed(row, changes):
    """Returns a layer's dtypes by step, and the reason for its demotion.

    The table is logged only at the end of an epoch, so the steps of changes
    come from events.
    """
    more = [
        [event["step"], dtype.rpartition(" ")[2]] for event, dtype in changes
    ]
    dtypes = sorted([*row["dtypes"], *more], key=lambda pair: pair[0])
    groups = itertools.groupby(dict(dtypes).items(), lambda pair: pair[1])
    own = {"dtypes": [list(next(pairs)) for _, pairs in groups]}
    own |= {"demoted_at": None, "demoted_because": None}
    # Name the reason only for a demotion that still holds.
    event, dtype = changes[-1] if changes else ({"kind": ""}, "")
    if event["kind"] == "demote" and dtype == dtype_now(row):
        why = event.get("because", {}).get(row["path"])
        own |= {"demoted_at": event["step"], "demoted_because": why}
    return own


def _findings(verdicts, over):
    kinds = [verdict["verdict"] for verdict in verdicts]
    repaired = {v["verdict"] for v in verdicts if over(v)}
    ranks = [*KINDS][::-1]
    severity = [ranks.index(x) + 1 if x in KINDS else 0 for x in kinds]
    return {
        "verdicts": kinds,
        "severity": max(severity, default=None),
        "repaired": bool(kinds) and repaired == {*kinds},
        "marks": [
            mark_of(words(kind), kind_of(kind).level, kind in repaired)
            for kind in kinds
        ],
    }


def _least_headroom(rows, tables):
    """Returns the least headroom and its step, by part and path.

    Only readings after the last change of precision count, because verdicts
    report earlier overflows. Gradients include the loss scale. Overflows of
    gradients do not count, because a dynamic loss scale needs some. Headroom is
    infinite if all numbers were zero.
    """
    since = max((s for row in rows for s, _ in row["dtypes"][1:]), default=-1)
    paths = {row["path"] for row in rows}
    least: dict = {part: {} for part in _LEAST}
    for table, part in itertools.product(tables, _LEAST):
        metric, found = f"{part}_headroom_bits", least[part]
        if metric not in table.metrics or not len(table.steps):
            continue
        values = as_sent(table.column(metric, table.layers))
        values[table.steps <= since] = np.nan
        if part == "gradient":
            values[values == -np.inf] = np.nan
        columns = np.flatnonzero(~np.isnan(values).all(axis=0))
        places = np.nanargmin(values[:, columns], axis=0)
        for column, place in zip(columns, places, strict=True):
            one = values[place, column].item(), table.steps[place].item()
            path = layer_of(table.layers[column], paths)
            found[path] = min(found.get(path, one), one)
    return least


def _headroom(row, least, verdicts, limit):
    """Returns the headroom of a layer, at most 0 if it overflows inside.

    For example, a sum may overflow before the division that makes it a mean.
    The headroom of the outputs does not show this.
    """
    own: dict = {"inside": None}
    for part, names in _LEAST.items():
        found = least[part].get(row["path"], (None, None))
        own |= dict(zip(names, found, strict=True))
    most = format_limits(limit)["maximum_bits"]
    for verdict in verdicts:
        largest = _largest_inside(verdict)
        if largest <= 0 or not _still_holds(verdict, row, limit):
            continue
        bits = min(most - math.log2(largest), 0.0)
        left, step = own["least_headroom"], moment(verdict)
        # The headroom inside a layer counts only if it is below the headroom of
        # the outputs.
        if left is None or left > bits:
            inside = {"step": step, "largest": largest, "outputs": left}
            inside |= _inside_in_words(step, row["compute_dtype"], limit)
            own |= {
                "inside": inside,
                "least_headroom": bits,
                "worst_step": step,
            }
    return own


def _largest_inside(verdict):
    """Returns the largest number inside the layer, or 0 if not known."""
    if verdict["verdict"] != "forward_overflow":
        return 0.0
    try:  # `float` reads infinity, which is a string in the log.
        return float(verdict.get("numbers", {}).get(_INSIDE, 0))
    except (TypeError, ValueError):
        return 0.0


def _still_holds(verdict, row, limit):
    """Returns whether a layer still overflows, or is wider for that reason."""
    if is_repaired("forward_overflow", dtype_now(row)):
        return row["compute_dtype"] != limit
    # A layer returns to 16 bits only if it no longer overflows in 16 bits.
    changed = row["dtypes"][-1][0] if row["dtypes"][1:] else -1
    return verdict["step"] > changed


def _inside_in_words(step, dtype, limit):
    """Describes an overflow inside a layer, open until a dtype is wider."""
    is_open = not is_wider(dtype, limit)
    short, more = f"beyond {limit} inside the layer", f"computed in {dtype}"
    if is_open:
        short = "overflow inside the layer"
        more = f"found {format_moment(step)}"
    return {"long": f"{short}, {more}", "short": short, "is_open": is_open}


def _outputs(row):
    """Returns the least headroom of the outputs alone."""
    return row["inside"]["outputs"] if row["inside"] else row["least_headroom"]


def _blame(row, by_path, limit, because):
    """Finds out why the outputs of a layer are infinite, NaN or all zero."""
    made, source = _outputs(row), row["passes_on"].get("activation")
    origin = by_path.get(source)
    passed = (
        origin is not None
        and not is_wider(origin["compute_dtype"], limit)
        and made == _outputs(origin)
        and abs(made or 0) == math.inf
    )
    own = {
        "passed_from": origin["path"] if passed else None,
        "lost_because": (not passed and made == -math.inf and because) or None,
    }
    known = own["lost_because"], own["passed_from"], made == math.inf
    return own | {"passed": _in_words(*known) if any(known[:2]) else None}


def _in_words(because, path, is_zero):
    """Describes a cause outside the layer, in a long and a short form."""
    if because:
        return {
            "long": f"infinite or NaN because {because}, not because of "
            "the layer",
            "short": f"not finite: {because}",
        }
    what = "all zero" if is_zero else "not finite"
    short = f"{what}: comes from {path}"
    return {"long": f"{short}, which has a verdict", "short": short}


def left_in_words(bits: float) -> str:
    """Returns headroom in words, with a mark for an overflow."""
    if bits == -math.inf or bits > 0:
        return "▲ " * (bits < 0) + format_bits(bits)
    return "▲ overflow"


def passes_on(table: list, events: list) -> dict[str, dict]:
    """Returns, for each layer, the layer that passes bad numbers to it.

    Bad numbers are infinities and NaNs.

    Args:
        table: List of dicts, the layers in the order of the model.
        events: List of dicts.

    Returns:
        Dict from paths to a dict of paths by part, `"activation"` and
        `"gradient"`. A part is missing if the layer itself has a verdict, or if
        no layer before it has a verdict.
    """
    paths = [layer["path"] for layer in table]
    culprits = [_culprits(events, kinds) for kinds in (_FORWARD, _BACKWARD)]
    forward, backward = ([p for p in paths if p in own] for own in culprits)
    if all(FED_BY in layer for layer in table):
        fed_by = {layer["path"]: layer[FED_BY] for layer in table}
        activation = _reached(forward, _behind(fed_by))
        before = {path: [*own, *_holders(path)] for path, own in fed_by.items()}
        gradient = _reached(backward, before)
    else:
        activation = _later(forward, paths)
        gradient = _later(backward, paths[::-1])
    if forward:  # A non-finite loss makes every gradient non-finite.
        gradient = dict.fromkeys(paths, forward[0]) | gradient
    parts = {"activation": activation, "gradient": gradient}
    return {
        path: {
            part: own[path]
            for part, own in parts.items()
            if own.get(path) not in (None, path)
            and path not in (*forward, *backward)
        }
        for path in paths
    }


def fault_of_the_run(events: Iterable) -> dict | None:
    """Returns why layers are infinite or NaN if no layer is to blame.

    Returns:
        Dict with `"because"`, a clause, and `"since"`, the first step that is
        known to fail. `None` if no verdict blames the run as a whole.
    """
    found = []
    for event in events:
        if event["kind"] != "verdict" or event["layer"] is not None:
            continue
        since = event.get("failing_since")
        since = moment(event) if since is None else since
        if event["verdict"] == "divergence":
            diverged = has_diverged(event)
            because = (
                "training diverged" if diverged else "float32 fails as well"
            )
            # A divergence comes first, because it explains lost weights.
            found.insert(0, (because, since))
        elif event["verdict"] == "weights_lost":
            found.append(("weights were lost", since))
    if not found:
        return None
    return {"because": found[0][0], "since": min(since for _, since in found)}


def passed_cells(grid: Grid, metric: str, table: list, events: list) -> tuple:
    """Returns the cells whose cause is outside their layer.

    Layers pass on infinities, NaNs and outputs that are all zero. Zero
    gradients do not count, because the layer itself may have lost them.

    Args:
        grid: `Grid` of the metric.
        metric: String.
        table: List of dicts, the table of layers.
        events: List of dicts.

    Returns:
        A list and an array. The list has the origins, dicts with a `"long"` and
        a `"short"` text. The integer array `[layers, columns]` has the index of
        each cell's origin in the list, or -1.
    """
    origins: list = []
    cells = np.full(grid.worst.shape, -1, "i4")
    part = next((x for x in _PARTS if x in metric), None)
    if part and metric.startswith(("weight_", part)):
        for source, row, columns in _passed(grid, metric, part, table, events):
            if columns.any():
                said = _in_words(*source)
                origins += [] if said in origins else [said]
                cells[row, columns] = origins.index(said)
    return origins, cells


def _passed(grid, metric, part, table, events):
    """Yields arguments of `_in_words`, a row and its columns.

    Later items replace earlier items in the same cells.
    """
    known = passes_on(table, events)
    paths = [layer_of(call, known) for call in grid.layers]
    rows = collections.defaultdict(list)
    for row, path in enumerate(paths):
        rows[path].append(row)
    is_count = metric.endswith("_nonfinite")
    lost = grid.worst > 0 if is_count else grid.worst == -np.inf
    zero = (grid.worst == np.inf) & (part == "activation" and not is_count)
    if fault := fault_of_the_run(events):
        # Before the run begins to fail, a search for the loss scale may cause
        # overflows of gradients.
        late = grid.last >= (fault["since"] if part == "gradient" else 0)
        to_blame = _culprits(events)
        for row, path in enumerate(paths):
            if path not in to_blame:
                yield (fault["because"], None, False), row, lost[row] & late
    for row, path in enumerate(paths):
        origin = known.get(path, {}).get(part)
        before = rows.get(origin, [])
        for is_zero, kind in (False, lost), (True, zero):
            made = (kind[before] & kind[row]).any(axis=0)
            yield (None, origin, is_zero), row, made


# Parts of a layer in the names of metrics. `weight` is last, because it would
# also match `weight_gradient`.
_PARTS = ("activation", "gradient", "weight")


def _culprits(events, kinds=_FORWARD + _BACKWARD):
    return {
        event["layer"]
        for event in events
        if event["kind"] == "verdict"
        and event["verdict"] in kinds
        and "overflows_in_steps" not in event.get("numbers", {})
    }


def _holders(path):
    """Returns the layers that contain `a/b/c`: `a/b` and `a`, in this order."""
    folders = path.split("/")[:-1]
    return [*itertools.accumulate(folders, "{}/{}".format)][::-1]


def _behind(fed_by):
    """Returns the layers that each layer feeds, and its outer layers, by path.

    The log has no feeders for an inner layer. The feeders of its outer layer
    are used instead.
    """
    edges = {path: _holders(path) for path in fed_by}
    for path, own in fed_by.items():
        held = next(filter(None, map(fed_by.get, _holders(path))), [])
        for feeder in own or held:
            edges.setdefault(feeder, []).append(path)
    return edges


def _reached(sources, edges):
    """Returns the nearest source of each path that a source reaches."""
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
    """Returns the last source before each path, for models without a graph."""
    origins, last = {}, None
    for path in paths:
        last = path if path in sources else last
        origins[path] = last
    return origins
