"""What a log says of a run, in the forms in which the page asks for it.

Where the log comes from, a `Source` knows. Of the log this file knows no more
than its schema.
"""

import itertools
import math

import numpy as np

from keras_mixprec.metrics import AUDITED, describe
from keras_mixprec.reporting import passed_on, schema
from keras_mixprec.reporting.bad_input import bad_input_steps, mark_spoiled
from keras_mixprec.reporting.clock import time_of_training
from keras_mixprec.reporting.event_rows import counts_by_kind, rows_of_events
from keras_mixprec.reporting.facts import (
    join_failing,
    last_of_falls,
    level_of,
)
from keras_mixprec.reporting.figures import add_gradients_left, key_figures
from keras_mixprec.reporting.fixes import add_fixes
from keras_mixprec.reporting.format_limits import (
    format_limits,
    limits_in_use,
    measured_against,
)
from keras_mixprec.reporting.grid import HEADROOM_DTYPE, Grid
from keras_mixprec.reporting.layer_tables import (
    Table,
    pool_groups,
    rows_in_order,
)
from keras_mixprec.reporting.listed_runs import listed_run
from keras_mixprec.reporting.lowered_scale import add_harm
from keras_mixprec.reporting.performance import (
    Row,
    performance,
    skipped_of_timed,
    speed_notes,
)
from keras_mixprec.reporting.read_events import read_events
from keras_mixprec.reporting.run_layers import (
    add_events,
    add_headroom,
    add_inside,
    add_over,
    add_repairs,
    read_layers,
    read_paths,
)
from keras_mixprec.reporting.run_ranges import smallest_that_counts
from keras_mixprec.reporting.run_summary import (
    conclusion,
    policy_of,
    searches_apart,
    shares_in_16_bits,
    why_withheld,
)
from keras_mixprec.reporting.skipped_steps import batches_skipped
from keras_mixprec.reporting.source import Source
from keras_mixprec.reporting.text_formats import parse_json
from keras_mixprec.reporting.worth import float32_run

# The page shows fewer than this at once, and a picture element that wide
# would be most of what a screen has.
MAX_COLUMNS = 2000

# What the first value of a tag says of it.
_CONTENT = dict.fromkeys(
    (schema.PERFORMANCE, schema.LOSS, schema.EPOCHS), {"schema", "columns"}
) | dict.fromkeys((schema.HEAT, schema.ERRORS), {"schema", "layers", "metrics"})


class RunData:
    """A run as the page shows it.

    Args:
        name: String. What the run is called.
        source: `Source`.
    """

    def __init__(self, name: str, source: Source):
        self.name = name
        self._source = source
        self._tags = {}

    @property
    def listed(self) -> dict:
        """What the list of runs has of it, as `listed_run` returns it."""
        source = self._source
        return listed_run(self.name, source.contents.values(), source.written)

    @property
    def newer_schema(self) -> bool:
        """Whether a newer version wrote the log than this one can read."""
        return self.listed["newer_schema"]

    def overview(self) -> dict:
        """Returns all but the measurements by step, ready for JSON."""
        tables = self._tables(schema.HEAT), self._tables(schema.ERRORS)
        found = self._overview(*tables)
        events = found["events"]
        return found | {
            "figures": key_figures(found),
            "told": rows_of_events(events),
            "kinds": counts_by_kind(events, found["skipped"]),
            "speed_notes": speed_notes(found),
            "float32_run": float32_run(found),
        }

    def outline(self) -> dict:
        """Returns what `overview` does, with the headroom of the last reading.

        Reading all of what was measured is most of the time that `overview`
        takes; for a row of the table of runs it is only asked whether anything
        was.
        """
        families = schema.HEAT, schema.ERRORS
        last = [self._whole(self._chunks(f)[-1:], self._last) for f in families]
        found = self._overview(*last)
        measured = (x["least_headroom"] is not None for x in found["layers"])
        # The last reading may be of weights alone.
        return self.overview() if last[0] and not any(measured) else found

    def _overview(self, heat, errors):
        searches, events = searches_apart(last_of_falls(self.events()))
        join_failing(events)
        scale = self.scale()
        layers = self.layers()
        # Before events: a change at the first step hides what was before it.
        shares, policy = shares_in_16_bits(layers), policy_of(layers)
        add_fixes(events, layers)
        add_events(layers, events)
        add_headroom(layers, heat)
        add_inside(layers, events, measured_against(layers))
        add_repairs(layers, measured_against(layers))
        add_over(layers, events)
        passed_on.add_passed_on(layers, events)
        passed_on.add_origins(layers, measured_against(layers))
        passed_on.add_lost(layers, events)
        passed_on.add_words(layers)
        add_gradients_left(layers)
        add_harm(events, layers, heat)
        tables = heat + errors
        metrics = {m: p for t in tables for m, p in t.metrics.items()}
        # Of a part that the model does not have, such as attention, are none.
        known = {m: p for m, p in metrics.items() if _is_measured(m, tables)}
        overview = {
            "run": self.name,
            "last_step": self._last_step(events, scale, tables),
            "skipped": batches_skipped(events, scale),
            "layers": layers,
            "share_of_flops": shares,
            "policy": policy,
            "matmul_precision": _matmul_precision(events),
            "performance": self._performance(events, layers, scale),
            "scale": scale,
            "loss": self.loss(),
            "time": time_of_training(self._epoch_ends(), events),
            "events": events,
            "bad_input": sorted(bad_input_steps(events)),
            "heat": {
                "metrics": [describe(*item) for item in known.items()],
                "layers": rows_in_order(tables, _paths(layers)),
            }
            if tables
            else None,
            "format": format_limits(measured_against(layers)),
            "formats": limits_in_use(layers),
            "withheld": why_withheld(events),
            "trade_off": searches[-1] if searches else None,
            "histograms": {
                part: self.histogram_rows(part) for part in schema.EXPONENTS
            },
        }
        return overview | conclusion(overview)

    def events(self) -> list[dict]:
        """Returns everything that happened, by rising step."""
        lines = (parse_json(line, dict) for line in self._event_lines())
        events = (event for line in lines for event in read_events(line))
        whole = [event | {"level": level_of(event)} for event in events]
        return sorted(whole, key=lambda event: event["step"])

    def heat(self, metric: str, columns: int) -> bytes:
        """Returns a metric of every layer by step, the worst of each column.

        Args:
            metric: String.
            columns: Int >= 1. The most columns to return.

        Returns:
            Bytes; see `Grid.to_bytes`.

        Raises:
            KeyError: If there is no such metric.
        """
        grid = self.grid(metric, columns)
        # Most logs have no verdict, and to read all of its events takes time.
        if not passed_on.has_verdict(self._event_lines()):
            return grid.to_bytes()
        layers, events = self.layers(), self.events()
        join_failing(events)
        passed_on.add_passed_on(layers, events)
        found = passed_on.passed_cells(grid, metric, layers, events)
        return grid.to_bytes(found.groups())

    def grid(self, metric: str, columns: int) -> Grid:
        """Returns what `heat` does, as arrays."""
        family = schema.ERRORS if metric in AUDITED else schema.HEAT
        tables = [t for t in self._tables(family) if metric in t.metrics]
        if not tables:
            raise KeyError(metric)
        layers = rows_in_order(tables, read_paths(self._layer_points()))
        pool = tables[-1].metrics[metric]
        steps = np.concatenate([table.steps for table in tables])
        rows = np.concatenate([t.column(metric, layers) for t in tables])
        size = math.ceil(len(rows) / min(columns, MAX_COLUMNS))
        first = np.arange(0, len(rows), size)
        last = np.minimum(first + size, len(rows)) - 1
        worst = pool_groups(pool, rows, size).T
        lost = np.zeros(worst.shape, bool)
        if any(table.spoiled.any() for table in tables):  # As in few logs.
            rows = np.concatenate([t.lost(metric, layers) for t in tables])
            lost = np.logical_or.reduceat(rows, first).T
        # Counts and magnitudes go beyond float16.
        is_headroom = metric.endswith("headroom_bits")
        dtype = HEADROOM_DTYPE if is_headroom else "bfloat16"
        return Grid(layers, steps[first], steps[last], worst, pool, dtype, lost)

    def measured(self, metric: str) -> dict:
        """Returns a metric of every layer by step, ready for JSON.

        Args:
            metric: String.
        """
        grid = self.grid(metric, MAX_COLUMNS)
        rows = zip(grid.layers, grid.worst.tolist(), strict=True)
        return {"steps": grid.last.tolist(), "values": dict(rows)}

    def histogram(self, layer: str, part: str) -> dict:
        """Returns the exponents of a layer's numbers.

        Args:
            layer: String. The name of a layer's call.
            part: String. `"activation"` or `"gradient"`.

        Returns:
            Dict of lists by step: `"steps"`, `"exponents"`, `"counts"` and
            `"low"`, the exponent of the smallest magnitude that counts.

        Raises:
            KeyError: If there is no such histogram.
        """
        known = self._histogram_tags(part).get(layer)
        if not known:
            raise KeyError(f"{part} of {layer}")
        points = [point for tag in known for point in self._source.read(tag)]
        bins = [np.asarray(p.array, "int64").reshape(-1, 3) for p in points]
        pairs = [(b[:, 0].tolist(), b[:, 2].tolist()) for b in bins]
        return {
            "steps": [point.step for point in points],
            "exponents": [exponents for exponents, _ in pairs],
            "counts": [counts for _, counts in pairs],
            "low": [smallest_that_counts(*pair) for pair in pairs],
        }

    def layers(self) -> list[dict]:
        """Returns the table of layers as it was last; see `read_layers`."""
        return read_layers(self._layer_points())

    def _layer_points(self):
        if schema.LAYERS_TAG not in self._source.contents:
            return []
        return self._source.read(schema.LAYERS_TAG)

    def scale(self) -> list[dict]:
        """Returns the loss scale of each optimizer by step."""
        rows = {}
        for tag, content in self._source.contents.items():
            if (content.get("columns") or [None])[1:2] == ["scale"]:
                name = content.get("optimizer", "")
                rows.setdefault(name, []).append(tag)
        courses = []
        for name, tags in sorted(rows.items()):
            found = [row for tag in sorted(tags) for row in self._entries(tag)]
            table = np.reshape(found, (-1, len(schema.SCALE_COLUMNS)))
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

    def loss(self) -> dict | None:
        """Returns the loss by step, NaN where it was not finite.

        A dict of the lists `"steps"` and `"values"`, `None` if it was not
        logged.
        """
        tags = self._chunks(schema.LOSS)
        rows = [row.tolist() for tag in tags for row in self._entries(tag)]
        if not rows:
            return None
        steps, values = zip(*sorted(rows), strict=True)
        return {"steps": [int(step) for step in steps], "values": list(values)}

    def _epoch_ends(self):
        tags = self._chunks(schema.EPOCHS)
        return [
            tuple(row.tolist()) for tag in tags for row in self._entries(tag)
        ]

    def _performance(self, events, layers, scale):
        """Of the last `fit`; `None` in an older log."""
        begins = [e for e in events if e["kind"] == "train_begin"]
        contents, known = self._source.contents, {*schema.PERFORMANCE_COLUMNS}
        named = [
            dict(zip(contents[tag]["columns"], row.tolist(), strict=True))
            for tag in self._chunks(schema.PERFORMANCE)
            if known <= {*contents[tag]["columns"]}
            for row in self._entries(tag)
        ]
        # Older versions had another column.
        rows = [Row(*map(row.get, Row._fields)) for row in named]
        last = max((e["step"] for e in begins), default=0)
        rows = [row for row in rows if row.step > last]
        tuner = begins[-1].get("tuner", True) if begins else True
        skipped = skipped_of_timed(rows, scale, last)
        return performance(rows, layers, tuner, skipped)

    def _tables(self, family):
        return self._whole(self._chunks(family), self._source.read)

    def _whole(self, tags, read):
        """The tables of those tags that have values which are not damaged."""
        found = [(self._source.contents[tag], read(tag)) for tag in tags]
        tables = [Table(content, points) for content, points in found if points]
        mark_spoiled(tables, self._event_lines())
        return tables

    def _event_lines(self):
        chunks = self._chunks(schema.EVENTS)
        return itertools.chain(*(self._entries(tag) for tag in chunks))

    def _chunks(self, family):
        # A tag that does not say what it holds is damaged.
        needed = _CONTENT.get(family, {"schema"})
        chunks = [
            (found[1], tag)
            for tag, content in self._source.contents.items()
            if (found := schema.parse_chunk_tag(tag))
            and found[0] == family
            and needed <= content.keys()
        ]
        return [tag for _, tag in sorted(chunks)]

    def _last(self, tag):
        point = self._source.last(tag)
        return [point] if point else []

    def _entries(self, tag):
        return itertools.chain(*(point.array for point in self._last(tag)))

    def histogram_rows(self, part: str) -> list[str]:
        """Returns the layers' calls that there are histograms of a part of."""
        return sorted(self._histogram_tags(part))

    def _histogram_tags(self, part):
        """The tags of each layer's histograms, those of older versions first.

        Found once: of 2,000 layers there are 4,000 tags.
        """
        if part not in schema.EXPONENTS:
            raise KeyError(part)
        if part not in self._tags:
            found: dict = {}
            for tag in self._source.histograms:
                layer = schema.layer_of_histogram(part, tag)
                if layer is not None:
                    found.setdefault(layer, []).append(tag)
            order = {
                layer: schema.histogram_tags(part, layer) for layer in found
            }
            self._tags[part] = {
                layer: sorted(tags, key=order[layer].index)
                for layer, tags in found.items()
            }
        return self._tags[part]

    def _last_step(self, events, scale, tables):
        steps = [event["step"] for event in events]
        steps += [course["steps"][-1] for course in scale if course["steps"]]
        steps += [t.steps[-1].item() for t in tables if len(t.steps)]
        return max(steps, default=0)


def _is_measured(metric, tables):
    return any(t.has_values(metric) for t in tables if metric in t.metrics)


def _paths(layers):
    return [layer["path"] for layer in layers]


def _matmul_precision(events):
    """What float32 products were computed in, `None` in an older log."""
    begins = [event for event in events if event["kind"] == "train_begin"]
    text = begins[-1].get("matmul_precision") if begins else None
    return text if isinstance(text, str) else None
