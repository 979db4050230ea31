"""A run as a frozen record, from which all figures and sentences come."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterator

import numpy as np

from keras_mixprec.metrics import AUDITED, describe
from keras_mixprec.reporting import layers as layer_rows
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.bad_input import bad_input_steps, spoiled
from keras_mixprec.reporting.event_kinds import is_histogram, read_events
from keras_mixprec.reporting.facts import (
    Facts,
    facts_of,
    growth,
    last_of_falls,
    level_of,
)
from keras_mixprec.reporting.flat_loss import flat_loss
from keras_mixprec.reporting.format_limits import (
    format_limits,
    measured_against,
)
from keras_mixprec.reporting.headline import headline, main_finding
from keras_mixprec.reporting.layer_tables import (
    Grid,
    pooled_grid,
    rows_in_order,
)
from keras_mixprec.reporting.run_files import RunFiles, is_step, numbers
from keras_mixprec.reporting.told import told


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, as its log describes it.

    Tables are read on first use and do not change afterwards.

    Attributes:
        name: String. The name of the run.
        files: `RunFiles`.
    """

    name: str
    files: RunFiles

    @functools.cached_property
    def listed(self) -> dict:
        """The entry in the list of runs: see `RunFiles.listed`."""
        return self.files.listed(self.name)

    @functools.cached_property
    def events(self) -> list[dict]:
        """All events by rising step, each with its level."""
        rows = self.files.rows(schema.EVENTS)
        events = [event for row in rows for event in read_events(row)]
        found = sorted(events, key=lambda event: event["step"])
        found = last_of_falls(found)
        return [event | {"level": level_of(event)} for event in found]

    def of_kind(self, kind: str) -> list[dict]:
        """Returns the events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    @functools.cached_property
    def begins(self) -> list[dict]:
        """The events with which each call to `fit` begins."""
        return self.of_kind("train_begin")

    @functools.cached_property
    def facts(self) -> Facts:
        """The facts behind the headline."""
        facts = facts_of(self)
        course = None if 2 * self.skipped >= self.last_step else self.loss
        told = course, self.events, self.layers, facts.examined
        return facts._replace(flat_loss=flat_loss(*told))

    @functools.cached_property
    def headline(self) -> dict:
        """The run in one sentence, and its state."""
        return headline(self.facts)

    @functools.cached_property
    def finding(self) -> dict | None:
        """The main finding, with its index among the events."""
        found = main_finding(self.facts)
        events = [*map(id, self.events)]
        return found and found | {"place": events.index(id(found["event"]))}

    @property
    def main(self) -> dict:
        """The event of the main finding, or an empty dict."""
        return self.finding["event"] if self.finding else {}

    @functools.cached_property
    def told(self) -> list[dict]:
        """The rows of the event list, in words: see `told`."""
        return told(self)

    @functools.cached_property
    def settings(self) -> dict:
        """The event with which the last `fit` began, or an empty dict."""
        return self.begins[-1] if self.begins else {}

    @functools.cached_property
    def table(self) -> list[dict]:
        """The last table of layers, with the dtypes that each layer had."""
        return layer_rows.read_layers(self.files.rows(schema.LAYERS))

    @functools.cached_property
    def layers(self) -> list[dict]:
        """The table with the measurements and findings of each layer."""
        return layer_rows.layers_of(self.table, self.events, self.heat)

    @functools.cached_property
    def paths(self) -> list[str]:
        """The paths of the layers, in the order of the model."""
        return [layer["path"] for layer in self.table]

    @functools.cached_property
    def format(self) -> dict:
        """The format that headroom refers to."""
        return format_limits(measured_against(self.table))

    @functools.cached_property
    def heat(self) -> list:
        """The measurements of layers, a list of `Table`."""
        return self._tables(schema.HEAT)

    @functools.cached_property
    def errors(self) -> list:
        """The errors of layers against float32, a list of `Table`."""
        return self._tables(schema.ERRORS)

    @functools.cached_property
    def metrics(self) -> list[dict]:
        """The metrics that were measured, with their descriptions."""
        tables = self.heat + self.errors
        known = {m: pool for t in tables for m, pool in t.metrics.items()}
        return [
            describe(metric, pool)
            for metric, pool in known.items()
            if any(t.has_values(metric) for t in tables if metric in t.metrics)
        ]

    @property
    def rows(self) -> list[str]:
        """The measured layer calls, in the order of the model."""
        return rows_in_order(self.heat + self.errors, self.paths)

    @functools.cached_property
    def scale(self) -> list[dict]:
        """The loss scale of each optimizer by step."""
        named: dict = {}
        for row in self.files.rows(schema.SCALE):
            named.setdefault(str(row.get("optimizer", "")), []).append(row)
        courses = []
        for name, rows in sorted(named.items()):
            table = numbers(rows, schema.SCALE).tolist()
            known = [row for row in table if row[1] > 0 and is_step(row[2])]
            columns = [[row[n] for row in known] for n in range(3)]
            steps, scale, skipped = columns
            course = {"steps": [*map(int, steps)], "scale": scale}
            course["skipped"] = [*map(int, skipped)]
            courses.append({"optimizer": name} | course)
        return courses

    @functools.cached_property
    def loss(self) -> dict | None:
        """The loss by step, or `None` if not known."""
        rows = sorted(self._numbers(schema.LOSS))
        if not rows:
            return None
        steps, values = zip(*rows, strict=True)
        return {"steps": [*map(int, steps)], "values": [*values]}

    @functools.cached_property
    def speed(self) -> list[schema.Row]:
        """The speed of plain steps in the last `fit`."""
        rows = (schema.Row(*x) for x in self._numbers(schema.PERFORMANCE))
        last = self.settings.get("step", 0)
        return [row for row in rows if row.step > last and row.is_timed()]

    @property
    def histogram_layers(self) -> dict[str, list]:
        """The names of layer calls with histograms, by part."""
        # Skip exponents and counts, which account for most of the reading time.
        rows = self.files.rows(schema.HISTOGRAMS, until=b', "exponents"')
        found: dict = {part: set() for part in schema.EXPONENTS}
        for row in rows:
            found.get(str(row.get("part")), set()).add(str(row.get("layer")))
        return {part: sorted(names) for part, names in found.items()}

    def histogram_rows(self, mark: bytes = b"") -> Iterator[dict]:
        """Yields the rows of histograms whose text contains `mark`."""
        return filter(is_histogram, self.files.rows(schema.HISTOGRAMS, mark))

    def histograms(self, mark: bytes = b"") -> dict[tuple, dict]:
        """Returns exponent histograms by step.

        Args:
            mark: Bytes. Reads only rows whose text contains `mark`.

        Returns:
            Dict from pairs of a layer call and a part to dicts with the lists
            `"steps"`, `"exponents"` and `"counts"`.
        """
        found: dict = {}
        for row in self.histogram_rows(mark):
            own = found.setdefault((row["layer"], row["part"]), {})
            for name, key in _HISTOGRAM.items():
                own.setdefault(name, []).append(row[key])
        return found

    @functools.cached_property
    def last_step(self) -> int:
        """The last known step."""
        events = (e for e in self.events if e["kind"] != schema.TRADE_OFF_EVENT)
        steps = [event["step"] for event in events]
        steps += [
            course["steps"][-1] for course in self.scale if course["steps"]
        ]
        tables = self.heat + self.errors
        steps += [t.steps[-1].item() for t in tables if len(t.steps)]
        return max(steps, default=0)

    @functools.cached_property
    def skipped(self) -> int:
        """The number of batches with a skipped update.

        The log does not list every skipped step. If there are several
        optimizers, the number of unlisted steps is that of the optimizer with
        the most unlisted steps.
        """
        listed = {
            (event.get("optimizer", ""), event["at_step"])
            for event in self.of_kind("skipped_step")
            if "at_step" in event
        }
        counts = Counter(name for name, _ in listed)
        others = [
            growth([0, *course["skipped"]]) - counts[course["optimizer"]]
            for course in self.scale
        ]
        return len({step for _, step in listed}) + max([0, *others])

    @functools.cached_property
    def bad_input(self) -> list[int]:
        """The steps with non-finite inputs."""
        return sorted(bad_input_steps(self.events))

    def grid(self, metric: str, columns: int) -> Grid:
        """Returns the worst values of a metric by layer and step.

        Args:
            metric: String.
            columns: Int >= 1. The maximum number of columns.

        Raises:
            KeyError: If the metric was not measured.
        """
        tables = self.errors if metric in AUDITED else self.heat
        tables = [table for table in tables if metric in table.metrics]
        if not tables:
            raise KeyError(metric)
        layers = rows_in_order(tables, self.paths)
        return pooled_grid(tables, metric, layers, columns)

    def heat_bytes(self, metric: str, columns: int) -> bytes:
        """Returns the grid as bytes for the page, with origins of cells."""
        grid = self.grid(metric, columns)
        cells = layer_rows.passed_cells(grid, metric, self.table, self.events)
        return grid.to_bytes(*cells)

    def histogram(self, layer: str, part: str) -> dict:
        """Returns the exponent histograms of a layer call.

        Args:
            layer: String. The name of the layer call.
            part: String. `"activation"` or `"gradient"`.

        Returns:
            Dict of lists by step: `"steps"`, `"exponents"` and `"counts"`.

        Raises:
            KeyError: If there is no such histogram.
        """
        # Parse only the rows of this layer, because parsing all rows is slow.
        return self.histograms(json.dumps(layer).encode())[layer, part]

    def _tables(self, family):
        tables = self.files.tables(family)
        if not tables:
            return []
        # Judge all steps together: a gap between rows depends on its neighbors.
        steps = np.concatenate([table.steps for table in tables])
        ends = np.cumsum([len(table.steps) for table in tables])[:-1]
        marks = np.split(spoiled(steps, self.events), ends)
        return [
            dataclasses.replace(table, spoiled=rows)
            for table, rows in zip(tables, marks, strict=True)
        ]

    def _numbers(self, name):
        return numbers(self.files.rows(name), name).tolist()


_HISTOGRAM = {"steps": "step", "exponents": "exponents", "counts": "counts"}
