"""Reads the tables of a run from its folder."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

import numpy as np

from keras_mixprec.formats import printable
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.layer_tables import Table
from keras_mixprec.reporting.text_formats import parse_json

_OWN = re.compile(r"\w+\.(jsonl|bin)")


def find_runs(log_dir: str | os.PathLike) -> dict[str, str]:
    """Returns the run folders inside a folder, by run name.

    Run names are printable, even if folder names are not.

    Args:
        log_dir: String or path-like. The `log_dir` of a monitor, a folder that
            contains several such folders, or the folder of a run.
    """
    log_dir = os.fspath(log_dir)
    runs = {}
    for folder, inside, names in os.walk(log_dir):
        ours = schema.is_run_folder(os.path.basename(os.path.abspath(folder)))
        if ours and schema.EVENTS_FILE in names:
            runs[printable(os.path.relpath(folder, log_dir))] = folder
            inside.clear()  # A run folder contains no other run folder.
    return dict(sorted(runs.items()))


class RunFiles:
    """A snapshot of the tables of a run.

    Damaged rows are left out. Two snapshots are equal if they have the same
    folder and no data was written between them.

    Args:
        folder: String. The run's folder.

    Raises:
        OSError: If the folder was removed.

    Attributes:
        written: Float. The time of the last write, in seconds since 1970.
    """

    def __init__(self, folder: str):
        self._folder = folder
        with os.scandir(folder) as entries:
            own = [x for x in entries if _OWN.fullmatch(x.name) and x.is_file()]
            found = {x.name: x.stat() for x in own}
        self._sizes = {name: x.st_size for name, x in sorted(found.items())}
        # A comparison of sizes alone would miss a new file that is as long as
        # the old file.
        times = {name: x.st_mtime_ns for name, x in found.items()}
        self._version = folder, *sorted(times.items()), *self._sizes.items()
        self.written = max(times.values(), default=0) / 1e9

    def __eq__(self, other):
        return isinstance(other, RunFiles) and self._version == other._version

    def __hash__(self):
        return hash(self._version)

    def rows(
        self, table: str, mark: bytes = b"", until: bytes | None = None
    ) -> Iterator[dict]:
        """Yields the rows of a table. A missing table has no rows.

        Args:
            table: String, a name from `schema`.
            mark: Bytes. Yields only rows whose text contains `mark`.
            until: Bytes. Reads only the part of each row before this text.

        Raises:
            OSError: If the table was removed meanwhile.
        """
        name = f"{table}.jsonl"
        if name not in self._sizes:
            return
        with open(os.path.join(self._folder, name), "rb") as file:
            for line in file:
                if mark not in line:
                    continue
                if until is not None:
                    line = line.partition(until)[0] + b"}"
                if row := parse_json(line):
                    yield row

    def tables(self, family: str) -> list[Table]:
        """Returns the layer measurements of a family.

        Args:
            family: String, `schema.HEAT` or `schema.ERRORS`.

        Raises:
            OSError: If a file was removed meanwhile.
        """
        found = []
        for row in filter(self._describes, self.rows(family)):
            name, layers, metrics = row["file"], row["layers"], row["metrics"]
            dtype = schema.record_dtype(len(layers), len(metrics))
            if count := self._sizes[name] // dtype.itemsize:
                path = os.path.join(self._folder, name)
                records = np.memmap(path, dtype, "r", shape=(count,))
                sound = np.zeros(count, bool)
                found.append(Table(layers, metrics, records, sound))
        return found

    def last_step(self) -> int:
        """Returns the last step in any table, or -1."""
        names = schema.EVENTS, schema.LAYERS, schema.COUNTS, *schema.COLUMNS
        steps = [row.get("step") for name in names for row in self.rows(name)]
        families = schema.HEAT, schema.ERRORS
        tables = [table for name in families for table in self.tables(name)]
        steps += [table.steps[-1].item() for table in tables]
        known = (int(step or 0) for step in steps if is_step(step))
        return max(known, default=-1)

    def counts(self) -> dict[str, int]:
        """Returns the last value of each counter, by tag."""
        rows = self.rows(schema.COUNTS)
        last = {t: x for row in rows for t, x in row.items() if is_step(x)}
        return {t: int(x) for t, x in last.items() if schema.is_counter(t)}

    def calls_of_fit(self) -> int:
        """Returns the number of calls to `fit` in the log."""
        rows = self.rows(schema.EVENTS, b'"train_begin"')
        return sum(row.get("kind") == "train_begin" for row in rows)

    def listed(self, run: str) -> dict:
        """Returns the entry of this run for the list of runs.

        Args:
            run: String. The name of the run.

        Returns:
            Dict with `"run"`; `"newer_schema"`, true if a newer version wrote
            the run; `"written"`; and `"in_16_bits"`, true if any layer computed
            in 16 bits at the start, or `None` if not known.
        """
        about = [*self.rows(schema.RUN)]
        low = (row["in_16_bits"] for row in about if "in_16_bits" in row)
        return {
            "run": run,
            "newer_schema": any(map(_is_newer, about)),
            "written": self.written,
            "in_16_bits": next(low, None),
        }

    def _describes(self, row):
        """Returns whether a row describes a file of measurements."""
        layers, metrics = row.get("layers"), row.get("metrics")
        return (
            row.get("file") in self._sizes
            and isinstance(layers, list)
            and all(isinstance(layer, str) for layer in layers)
            and isinstance(metrics, dict)
            and {*metrics.values()} <= {"min", "max"}
        )


def _is_newer(about):
    found = about.get("schema")
    return isinstance(found, int) and found > schema.SCHEMA_VERSION


def is_step(value) -> bool:
    """Returns whether a value is the number of a step."""
    return isinstance(value, int | float) and 0 <= value < 2**53


def numbers(rows: Iterable[dict], table: str) -> np.ndarray:
    """Returns numeric rows as an array, without damaged rows.

    Args:
        rows: Dicts.
        table: String, one of `schema.COLUMNS`.
    """
    found, columns = [], schema.COLUMNS[table]
    for row in rows:
        # `float` also reads infinity and NaN, which are strings in the log.
        with contextlib.suppress(
            ArithmeticError, KeyError, TypeError, ValueError
        ):
            found.append([float(row[name]) for name in columns])
    array = np.reshape(found, (-1, len(columns)))
    return array[[is_step(step) for step in array[:, 0].tolist()]]
