"""What a log tells of a run, in the forms in which the page asks for it.

Where the log comes from, a `source` knows: from files, or from a running
TensorBoard. Of the log this file knows no more than its schema.
"""

import itertools
import json
import math
import re
import struct
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from keras_mixprec.formats import get_format
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.facts import WIDE, facts_of, is_repaired
from keras_mixprec.reporting.headline import headline
from keras_mixprec.reporting.json_text import parse_json
from keras_mixprec.reporting.thinning import pool_groups

# The page shows fewer than this at once, and a picture element that wide
# would be most of what a screen has.
MAX_COLUMNS = 2000

_KINDS = {
    "headroom_bits": "headroom",
    "nonfinite": "count",
    "error": "error",
}


# What follows the path of a layer in the name of a call but its first.
_SECOND_CALL = re.compile(r"#\d+$")

# What the first value of a tag says of it.
_CONTENT = dict.fromkeys(
    (schema.HEAT, schema.TWIN), {"schema", "layers", "metrics"}
)

# What an event has at least: people may log their own.
_FIELDS = {
    "verdict": {"verdict", "layer", "direction", "advice"},
    "ranges_withheld": {"message"},
    **dict.fromkeys(("demote", "shrink", "promote"), {"layers"}),
}


class Point(NamedTuple):
    """A value of a tag.

    Attributes:
        step: Int.
        array: NumPy array, of bytes objects for strings.
    """

    step: int
    array: np.ndarray


class Grid(NamedTuple):
    """A metric of every layer, by steps.

    Attributes:
        layers: List of strings, the rows.
        first, last: Integer arrays, the steps that each column begins and
            ends with.
        worst: Array `[layers, columns]`, NaN where nothing was measured.
        pool: String. `"min"` or `"max"`, whichever is the worse.
    """

    layers: list
    first: np.ndarray
    last: np.ndarray
    worst: np.ndarray
    pool: str


class Source(Protocol):
    """Where a run's log comes from.

    Attributes:
        contents: Dict from each tag of ours to what its first value says of
            it: a dict with `"schema"`.
        histograms: List of the tags of histograms.
    """

    contents: dict
    histograms: list

    def read(self, tag: str) -> list[Point]:
        """Returns the values of a tag by rising step."""


class RunData:
    """A run as the page shows it.

    Args:
        name: String. What the run is called.
        source: `Source`.
    """

    def __init__(self, name: str, source: Source):
        self.name = name
        self._source = source

    @property
    def newer_schema(self) -> bool:
        """Whether a newer version wrote the log than this one can read."""
        return self.is_newer(self._source.contents.values())

    @staticmethod
    def is_newer(contents) -> bool:
        """Whether a newer version wrote any of these contents of tags."""
        found = (content.get("schema") for content in contents)
        known = schema.SCHEMA_VERSION
        return any(isinstance(x, int) and x > known for x in found)

    def overview(self) -> dict:
        """Returns all but the measurements by step, ready for JSON."""
        heat, events = self._tables(schema.HEAT), self.events()
        scale = self._scale()
        layers = self._layers()
        _add_verdicts(layers, events)
        _add_headroom(layers, heat)
        _add_repairs(layers)
        twin = self._tables(schema.TWIN)
        tables = heat + twin
        metrics = {m: p for t in tables for m, p in t.metrics.items()}
        overview = {
            "run": self.name,
            "last_step": self._last_step(events, scale, tables),
            "skipped": sum(map(_skipped, scale)),
            "layers": layers,
            "scale": scale,
            "events": events,
            "heat": {
                "metrics": [_describe(*item) for item in metrics.items()],
                # Diagnoses leave out layers in float32: probes know the order.
                "layers": _names(twin + heat),
            }
            if tables
            else None,
            "format": _limits(_measured_against(layers)),
            "formats": _formats(layers),
            "withheld": _withheld(events),
            "histograms": {
                part: self._histograms_of(family)
                for part, family in schema.EXPONENTS.items()
            },
        }
        return overview | {"headline": headline(facts_of(overview))}

    def events(self) -> list[dict]:
        """Returns everything that happened, by rising step."""
        events = [
            parse_json(line, dict)
            for tag in self._chunks(schema.EVENTS)
            for line in self._last(tag)
        ]
        whole = [event for event in events if _is_whole(event)]
        return sorted(whole, key=lambda event: event["step"])

    def heat(self, metric: str, columns: int) -> bytes:
        """Returns a metric of every layer by step, the worst of each column.

        Args:
            metric: String.
            columns: Int >= 1. The most columns to return.

        Returns:
            Bytes: the length of a header as a little-endian uint32, the
            header as JSON padded with spaces to a multiple of four, and the
            numbers as little-endian bfloat16, a row for each layer. Three
            digits are more than a colour shows.

        Raises:
            KeyError: If there is no such metric.
        """
        grid = self.grid(metric, columns)
        header = {
            "layers": grid.layers,
            "from": grid.first.tolist(),
            "until": grid.last.tolist(),
            "pool": grid.pool,
        }
        return _binary(header, grid.worst)

    def grid(self, metric: str, columns: int) -> "Grid":
        """Returns what `heat` does, as arrays."""
        family = schema.TWIN if metric.startswith("twin_") else schema.HEAT
        tables = [t for t in self._tables(family) if metric in t.metrics]
        if not tables:
            raise KeyError(metric)
        layers = _names(tables)
        pool = tables[-1].metrics[metric]
        steps = np.concatenate([table.steps for table in tables])
        rows = np.concatenate([t.column(metric, layers) for t in tables])
        size = math.ceil(len(rows) / min(columns, MAX_COLUMNS))
        first = np.arange(0, len(rows), size)
        last = np.minimum(first + size, len(rows)) - 1
        worst = pool_groups(pool, rows, size).T
        return Grid(layers, steps[first], steps[last], worst, pool)

    def histogram(self, layer: str, part: str) -> dict:
        """Returns the exponents of a layer's numbers.

        Args:
            layer: String. The name of a layer's call.
            part: String. `"activation"` or `"gradient"`.

        Returns:
            Dict of lists by step: `"steps"`, `"exponents"` and `"counts"`.

        Raises:
            KeyError: If there is no such histogram.
        """
        tag = f"{schema.EXPONENTS[part]}/{layer}"
        if tag not in self._source.histograms:
            raise KeyError(tag)
        points = self._source.read(tag)
        bins = [np.asarray(p.array, "int64").reshape(-1, 3) for p in points]
        return {
            "steps": [point.step for point in points],
            "exponents": [b[:, 0].tolist() for b in bins],
            "counts": [b[:, 2].tolist() for b in bins],
        }

    def _layers(self):
        points = (
            self._source.read(schema.LAYERS_TAG)
            if schema.LAYERS_TAG in self._source.contents
            else []
        )
        return parse_json(points[-1].array.item(), list) if points else []

    def _scale(self):
        rows = {}
        for tag, content in self._source.contents.items():
            if (content.get("columns") or [None])[1:2] == ["scale"]:
                name = content.get("optimizer", "")
                rows.setdefault(name, []).append((tag, self._last(tag)))
        courses = []
        for name, chunks in sorted(rows.items()):
            table = np.concatenate([chunk for _, chunk in sorted(chunks)])
            steps, scale, skipped, _ = table.T.tolist()
            courses.append(
                {
                    "optimizer": name,
                    "steps": [int(step) for step in steps],
                    "scale": scale,
                    "skipped": [int(count) for count in skipped],
                }
            )
        return courses

    def _tables(self, family):
        return [
            _Table(self._source.contents[tag], self._source.read(tag))
            for tag in self._chunks(family)
        ]

    def _chunks(self, family):
        found = map(schema.parse_chunk_tag, self._source.contents)
        indices = sorted(n for name, n in filter(None, found) if name == family)
        tags = [schema.chunk_tag(family, index) for index in indices]
        # A tag that does not say what it holds is damaged.
        needed = _CONTENT.get(family, {"schema"})
        contents = self._source.contents
        return [tag for tag in tags if needed <= contents[tag].keys()]

    def _last(self, tag):
        points = self._source.read(tag)
        return points[-1].array if points else []

    def _histograms_of(self, family):
        start = f"{family}/"
        return [
            tag.removeprefix(start)
            for tag in self._source.histograms
            if tag.startswith(start)
        ]

    def _last_step(self, events, scale, tables):
        steps = [event["step"] for event in events]
        steps += [course["steps"][-1] for course in scale if course["steps"]]
        steps += [t.steps[-1].item() for t in tables if len(t.steps)]
        return max(steps, default=0)


class _Table:
    """Measurements of layers by step, of one tag."""

    def __init__(self, content, points):
        self.layers = content["layers"]
        self.metrics = content["metrics"]
        self.steps = np.array([point.step for point in points], "int64")
        self._points = points

    def column(self, metric, layers):
        """One metric as an array `[steps, layers]`, NaN for other layers."""
        index = list(self.metrics).index(metric)
        own = np.stack([point.array[:, index] for point in self._points])
        places = {name: place for place, name in enumerate(layers)}
        result = np.full((len(own), len(layers)), np.nan, "float32")
        result[:, [places[name] for name in self.layers]] = own
        return result


def _names(tables):
    # In the order of the last: layers may have come and gone.
    return list(dict.fromkeys(x for t in reversed(tables) for x in t.layers))


def _describe(metric, pool):
    kinds = [kind for end, kind in _KINDS.items() if metric.endswith(end)]
    return {"name": metric, "kind": (kinds or ["share"])[0], "worst": pool}


def _measured_against(layers):
    """The dtype that headroom refers to."""
    dtypes = {layer["compute_dtype"] for layer in layers}
    only_wide = "bfloat16" in dtypes and "float16" not in dtypes
    return "bfloat16" if only_wide else "float16"


def _formats(layers):
    """The limits of the formats that layers compute in, by dtype."""
    dtypes = sorted({str(layer["compute_dtype"]) for layer in layers})
    known = [dtype for dtype in dtypes if "float" in dtype]
    return {dtype: _limits(dtype) for dtype in known}


def _limits(dtype):
    limits = get_format(dtype)
    return {
        "name": limits.name,
        "maximum_exponent": math.frexp(limits.maximum)[1],
        "normal_exponent": int(math.log2(limits.smallest_normal)),
        "subnormal_exponent": int(math.log2(limits.smallest_subnormal)),
    }


def _withheld(events):
    """Why ranges of layers were not measured, `None` if that is not told."""
    told = [e for e in events if e["kind"] == "ranges_withheld"]
    return told[-1]["message"] if told else None


def _is_whole(event):
    needed = {"kind", "step"} | _FIELDS.get(event.get("kind"), set())
    return needed <= event.keys()


def _skipped(course):
    """How many steps were skipped, by all runs into the folder."""
    counts = [0, *course["skipped"]]
    # An optimizer that counts from 0 again was made for another run.
    return sum(
        now - before if now >= before else now
        for before, now in itertools.pairwise(counts)
    )


def _add_verdicts(layers, events):
    known = {layer["path"]: layer for layer in layers}
    for layer in layers:
        layer |= {"verdicts": [], "demoted_at": None, "demoted_because": None}
    for event in events:
        if event["kind"] == "verdict" and event.get("layer") in known:
            known[event["layer"]]["verdicts"].append(event["verdict"])
        changes = "layers" in _FIELDS.get(event["kind"], ())
        for path, change in event["layers"].items() if changes else ():
            if path in known:
                _add_change(known[path], event, path, change)


def _add_change(layer, event, path, change):
    # Not if it was only advised, is undone, or was in an earlier run.
    now = change["after"].removeprefix("mixed_") == layer["compute_dtype"]
    demoted = now and event["kind"] not in ("promote", "shrink")
    layer["demoted_at"] = event["step"] if demoted else None
    reason = event.get("reasons", {}).get(path)
    layer["demoted_because"] = reason if demoted else None


def _add_headroom(layers, tables):
    """Adds the least headroom of a layer's activations, and when it was."""
    least = {}
    paths = {layer["path"] for layer in layers}
    metric = "activation_headroom_bits"
    for table in tables:
        if metric not in table.metrics or not len(table.steps):
            continue
        rows = table.column(metric, table.layers)
        rows = np.where(np.isnan(rows), np.inf, rows)
        worst = rows.argmin(axis=0)
        columns = zip(table.layers, worst, rows.T, strict=True)
        for name, place, column in columns:
            path = name if name in paths else _SECOND_CALL.sub("", name)
            bits = column[place].item()
            if bits < least.get(path, (math.inf, None))[0]:
                least[path] = round(bits, 2), table.steps[place].item()
    for layer in layers:
        bits, step = least.get(layer["path"], (None, None))
        layer |= {"least_headroom": bits, "worst_step": step}


def _add_repairs(layers):
    """Adds what is no finding any more.

    `"repaired"` is whether a layer computes by now in what all its verdicts
    ask for, `"beyond"` the format whose range the activations of a wider layer
    exceed.
    """
    limit = _measured_against(layers)
    for layer in layers:
        dtype, kinds = layer["compute_dtype"], layer["verdicts"]
        low = layer["least_headroom"]
        exceeds = dtype in WIDE and low is not None and low <= 0
        layer |= {
            "repaired": bool(kinds)
            and all(is_repaired(kind, dtype) for kind in kinds),
            "beyond": limit if exceeds else None,
        }


def _binary(header, numbers):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    body = numbers.astype(ml_dtypes.bfloat16).view("uint16").astype("<u2")
    return struct.pack("<I", len(text)) + text + body.tobytes()
