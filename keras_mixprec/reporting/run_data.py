"""What a log says of a run, in the forms in which the page asks for it."""

import functools
import json
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
from keras_mixprec.reporting.figures import key_figures, words_of
from keras_mixprec.reporting.fixes import add_fixes
from keras_mixprec.reporting.format_limits import (
    format_limits,
    measured_against,
)
from keras_mixprec.reporting.grid import HEADROOM_DTYPE, Grid
from keras_mixprec.reporting.layer_tables import pool_groups, rows_in_order
from keras_mixprec.reporting.lowered_scale import add_harm
from keras_mixprec.reporting.performance import (
    performance,
    skipped_of_timed,
    speed_notes,
)
from keras_mixprec.reporting.read_events import is_histogram, read_events
from keras_mixprec.reporting.run_files import RunFiles, is_step, numbers
from keras_mixprec.reporting.run_layers import (
    add_events,
    add_headroom,
    add_inside,
    add_repairs,
    read_layers,
)
from keras_mixprec.reporting.run_summary import (
    conclusion,
    policy_of,
    searches_apart,
    shares_in_16_bits,
    why_withheld,
)
from keras_mixprec.reporting.skipped_steps import batches_skipped
from keras_mixprec.reporting.what_if import left_out
from keras_mixprec.reporting.worth import float32_run

# The page shows fewer than this at once, and a picture element that wide
# would be most of what a screen has.
MAX_COLUMNS = 2000


class RunData:
    """A run as the page shows it.

    Args:
        name: String. What the run is called.
        log: `RunFiles`.

    Attributes:
        listed: Dict, what the list of runs has of it: see `RunFiles.listed`.
    """

    def __init__(self, name: str, log: RunFiles):
        self.name = name
        self._log = log
        self._known: dict = {}
        self.listed = log.listed(name)

    def overview(self) -> dict:
        """Returns all but the measurements by step, ready for JSON."""
        found = self.outline()
        events = found["events"]
        return found | {
            "histograms": {
                part: sorted(layers)
                for part, layers in self.histograms().items()
            },
            "figures": key_figures(found),
            "told": rows_of_events(events),
            "kinds": counts_by_kind(events, found["skipped"]),
            "speed_notes": speed_notes(found),
            "float32_run": float32_run(found),
        }

    def outline(self) -> dict:
        """Returns what the row of the table of runs is made of."""
        heat, errors = self._tables(schema.HEAT), self._tables(schema.ERRORS)
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
        add_repairs(layers)
        passed_on.add_passed_on(layers, events)
        passed_on.add_origins(layers, measured_against(layers))
        passed_on.add_lost(layers, events)
        add_harm(events, layers, heat)
        tables = heat + errors
        metrics = {m: p for t in tables for m, p in t.metrics.items()}
        # Of a part that the model does not have, such as attention, are none.
        bad_input = sorted(bad_input_steps(events))
        known = {m: p for m, p in metrics.items() if _is_measured(m, tables)}
        overview = {
            "run": self.name,
            "last_step": self._last_step(events, scale, tables),
            "skipped": batches_skipped(events, scale),
            "layers": [layer | words_of(layer) for layer in layers],
            "share_of_flops": shares,
            "policy": policy,
            "matmul_precision": _matmul_precision(events),
            "performance": self._performance(events, layers, scale),
            "scale": scale,
            "loss": self.loss(),
            "time": time_of_training(self._epoch_ends(), events),
            "events": events,
            "bad_input": bad_input,
            "left_out": left_out(bad_input),
            "heat": {
                "metrics": [describe(*item) for item in known.items()],
                "layers": rows_in_order(tables, _paths(layers)),
            }
            if tables
            else None,
            "format": format_limits(measured_against(layers)),
            "withheld": why_withheld(events),
            "trade_off": searches[-1] if searches else None,
        }
        return overview | conclusion(overview)

    def events(self) -> list[dict]:
        """Returns everything that happened, by rising step."""
        # Those who ask add to them what they find.
        return [{**event} for event in self._events]

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
        layers, events = self.layers(), self.events()
        join_failing(events)
        passed_on.add_passed_on(layers, events)
        found = passed_on.passed_cells(grid, metric, layers, events)
        return grid.to_bytes(found.in_words(), found.cells)

    def grid(self, metric: str, columns: int) -> Grid:
        """Returns what `heat` does, as arrays."""
        family = schema.ERRORS if metric in AUDITED else schema.HEAT
        tables = [t for t in self._tables(family) if metric in t.metrics]
        if not tables:
            raise KeyError(metric)
        layers = rows_in_order(tables, _paths(self.layers()))
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
            Dict of lists by step: `"steps"`, `"exponents"` and `"counts"`.

        Raises:
            KeyError: If there is no such histogram.
        """
        mark = json.dumps(layer).encode()
        rows = self.histograms(mark).get(part, {}).get(layer, [])
        if not rows:
            raise KeyError(f"{part} of {layer}")
        return {
            "steps": [row["step"] for row in rows],
            "exponents": [row["exponents"] for row in rows],
            "counts": [row["counts"] for row in rows],
        }

    def histograms(self, mark: bytes = b"") -> dict:
        """Returns the rows of histograms by part, and by a layer's call.

        Args:
            mark: As for `RunFiles.rows`.
        """
        if mark and schema.HISTOGRAMS not in self._known:
            return _by_layer(self._log.rows(schema.HISTOGRAMS, mark))
        return self._read(
            schema.HISTOGRAMS, lambda name: _by_layer(self._log.rows(name))
        )

    def layers(self) -> list[dict]:
        """Returns the table of layers as it was last; see `read_layers`."""
        return [{**row} for row in self._layers]

    def scale(self) -> list[dict]:
        """Returns the loss scale of each optimizer by step."""
        named: dict = {}
        for row in self._read(schema.SCALE, self._log.rows):
            named.setdefault(str(row.get("optimizer", "")), []).append(row)
        courses = []
        for name, rows in sorted(named.items()):
            table = numbers(rows, schema.SCALE)
            is_known = [x > 0 and is_step(n) for _, x, n, _ in table.tolist()]
            steps, scale, skipped, _ = table[is_known].T.tolist()
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
        rows = self._numbers(schema.LOSS).tolist()
        if not rows:
            return None
        steps, values = zip(*sorted(rows), strict=True)
        return {"steps": [int(step) for step in steps], "values": list(values)}

    def _epoch_ends(self):
        return self._numbers(schema.EPOCHS).tolist()

    def _performance(self, events, layers, scale):
        """How fast the last `fit` was."""
        begins = [e for e in events if e["kind"] == "train_begin"]
        found = self._numbers(schema.PERFORMANCE).tolist()
        last = max((e["step"] for e in begins), default=0)
        known = (schema.Row(*row) for row in found)
        rows = [row for row in known if row.step > last and row.is_timed()]
        tuner = begins[-1].get("tuner", True) if begins else True
        skipped = skipped_of_timed(rows, scale, last)
        return performance(rows, layers, tuner, skipped)

    def _tables(self, family):
        tables = self._read(family, self._log.tables)
        mark_spoiled(tables, self.events())
        return tables

    def _numbers(self, name):
        return numbers(self._read(name, self._log.rows), name)

    @functools.cached_property
    def _events(self):
        rows = self._log.rows(schema.EVENTS)
        events = (event for row in rows for event in read_events(row))
        whole = [event | {"level": level_of(event)} for event in events]
        return sorted(whole, key=lambda event: event["step"])

    @functools.cached_property
    def _layers(self):
        return read_layers(self._log.rows(schema.LAYERS))

    def _read(self, name, read):
        """Read once: the log may be removed before all is asked for."""
        if name not in self._known:
            self._known[name] = read(name)
        return self._known[name]

    def _last_step(self, events, scale, tables):
        steps = [event["step"] for event in events]
        steps += [course["steps"][-1] for course in scale if course["steps"]]
        steps += [t.steps[-1].item() for t in tables if len(t.steps)]
        return max(steps, default=0)


def _by_layer(rows):
    """Histograms by part, and by a layer's call."""
    found: dict = {part: {} for part in schema.EXPONENTS}
    for row in filter(is_histogram, rows):
        found[row["part"]].setdefault(row["layer"], []).append(row)
    return found


def _is_measured(metric, tables):
    return any(t.has_values(metric) for t in tables if metric in t.metrics)


def _paths(layers):
    return [layer["path"] for layer in layers]


def _matmul_precision(events):
    """What float32 products were computed in, `None` if it is not logged."""
    begins = [event for event in events if event["kind"] == "train_begin"]
    text = begins[-1].get("matmul_precision") if begins else None
    return text if isinstance(text, str) else None
