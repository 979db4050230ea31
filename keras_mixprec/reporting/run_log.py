"""The log of one training run, which the monitor writes."""

import itertools
import json
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from keras_mixprec import _clock
from keras_mixprec._files import check_local
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.reporting import schema, summaries
from keras_mixprec.reporting.append_file import (
    LIMIT,
    AppendFile,
    Backlog,
    claim_folder,
    open_lines,
)
from keras_mixprec.reporting.event_file import EventFile
from keras_mixprec.reporting.facts import STORY
from keras_mixprec.reporting.layer_tables import LayerTables
from keras_mixprec.reporting.run_files import RunFiles
from keras_mixprec.reporting.text_formats import markdown_table, to_json


class RunLog:
    """Writes a training run to `<log_dir>/mixprec`, for TensorBoard and people.

    Each call returns when its data is on disk. Layer measurements may wait
    longer, because long runs pool them. The class is thread-safe. Calls in a
    forked child do nothing.

    A second run in the same `log_dir` appends to the same tables and starts
    another event file. Its steps must continue from `next_step`, because
    TensorBoard deletes repeated steps. Simultaneous runs get separate folders:
    `mixprec`, `mixprec_2` and so on.

    Once the log is open, disk errors do not raise. If the disk is full, up to
    16 MiB of writes wait. If files were removed, the log creates new files. In
    both cases the log warns once, and a `log_gap` event counts lost records.

    Args:
        log_dir: String or path-like. A local folder; created if missing.

    Raises:
        TypeError: If `log_dir` is not a path.
        ValueError: If `log_dir` is a URL.
        OSError: If `log_dir` is not writable.

    Attributes:
        folder: String. `<log_dir>/mixprec`, or `mixprec_2` and so on.
        next_step: Int. The first step for curves of this run: 0 in a new
            folder, or one more than the last step of the earlier run.
        counts: Dict from the tags of counters to their last values in earlier
            runs.
        fits: Int. The number of earlier `fit` calls in the folder.
        story: List of dicts, the events that the headline needs.
        writes: Boolean, `True`.

    Example:
    >>> import tempfile
    >>> from keras_mixprec.reporting.run_log import RunLog
    >>> log_dir = tempfile.mkdtemp()
    >>> with RunLog(log_dir) as log:
    ...     log.scalars(0, {"mixprec/loss_scale": 32768.0})
    ...     log.event(0, {"kind": "skipped_step", "scale": 32768.0})
    >>> RunLog(log_dir).next_step
    1
    """

    writes = True

    def __init__(self, log_dir: str | os.PathLike):
        self._log_dir = log_dir = check_local(log_dir)
        self.story: list[dict] = []
        try:
            self.folder, events = claim_folder(log_dir)
            known = RunFiles(self.folder)
            self.next_step = known.last_step() + 1
            self.counts = known.counts()
            self.fits = known.calls_of_fit()
            self._events = EventFile(self.folder, self.next_step)
        except OSError as error:
            raise OSError(
                error.errno,
                f"`log_dir` must be a writable folder ({error.strerror}). "
                "Choose another folder or fix its permissions. "
                "Received: log_dir",
                log_dir,
            ) from error
        self._files = {schema.EVENTS_FILE: events}
        self._heat = {
            name: LayerTables() for name in (schema.HEAT, schema.ERRORS)
        }
        # The columns and the name of the file to which each family of
        # measurements is written now.
        self._measured: dict[str, tuple] = {}
        numbers = re.findall(r"_(\d+)\.bin", " ".join(os.listdir(self.folder)))
        first = 1 + max(map(int, numbers), default=-1)
        self._numbers = itertools.count(first)
        self._lock = threading.RLock()
        self._backlog = Backlog()
        self._gap, self._warned = None, False
        # Entries about the whole run. If somebody removes the files, the new
        # files need these entries again.
        self._standing: dict[str, tuple] = {}
        self._add(0, schema.RUN, [{"schema": schema.SCHEMA_VERSION}])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point of each curve.

        Args:
            step: Int. The number of the training batch, which must rise from
                `next_step`. `optimizer.iterations` is wrong here, because it
                leaves out skipped steps.
            values: Dict tag -> number, which may be infinite or NaN.
        """
        counts = {t: x for t, x in values.items() if schema.is_counter(t)}
        # Write the counts before the curves. If the process is killed between
        # the two, the next run does not repeat the step.
        self._add(step, schema.COUNTS, [{"step": step, **counts}])
        self._draw(step, [summaries.scalar(*item) for item in values.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Writes an entry of the Text tab. Steps must rise, as in `scalars`."""
        self._draw(step, [summaries.text(tag, markdown)])

    def histograms(self, step: int, found: Sequence[tuple]) -> None:
        """Writes exponent histograms. Steps must rise, as in `scalars`.

        Args:
            step: Int. The number of the training batch.
            found: List of triples: `"activation"` or `"gradient"`, the name of
                a layer call, and an array `[k, 3]` of left edges, right edges
                and counts.
        """
        values, lines = [], []
        for part, layer, bins in found:
            tag = f"{schema.EXPONENTS[part]}/{layer}"
            values.append(summaries.histogram(tag, bins))
            exponents, _, counts = np.asarray(bins, "int64").T.tolist()
            row = {"step": step, "part": part, "layer": layer}
            row |= {"exponents": exponents, "counts": counts}
            # `to_json` is too slow for thousands of rows. It would only turn
            # NaN and infinity into strings, and these numbers are integers.
            lines.append(f"{json.dumps(row)}\n")
        self._draw(step, values)
        name = f"{schema.HISTOGRAMS}.jsonl"
        self._append(step, name, "".join(lines).encode())

    def layers(self, step: int, table: Sequence[Mapping]) -> None:
        """Writes the table of layers, at the start and after each change.

        Args:
            step: Int. Number of the training batch.
            table: List of dicts with the same keys, one per layer.
        """
        low = any(row.get("compute_dtype") in SIXTEEN_BITS for row in table)
        about = {"schema": schema.SCHEMA_VERSION, "in_16_bits": low}
        text = summaries.text(schema.LAYER_DTYPES_TAG, markdown_table(table))
        own = {"step": step, "layers": table}
        tables = {schema.RUN: about, schema.LAYERS: own}
        self._write_standing("layers", step, [text], tables)

    def rows(self, step: int, table: str, rows, **content) -> None:
        """Writes numeric rows to a table.

        Args:
            step: Int. The number of the current training batch.
            table: String, one of `schema.COLUMNS`.
            rows: Array `[n, columns]`.
            **content: Further fields for every row.
        """
        columns = schema.COLUMNS[table]
        rows = np.asarray(rows, np.float64).tolist()
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self._add(step, table, [row | content for row in named])

    def heat(
        self,
        step: int,
        table: np.ndarray,
        layers: Sequence[str],
        metrics: Mapping[str, str],
        family: str = schema.HEAT,
    ) -> None:
        """Writes layer measurements. Steps must rise, as in `scalars`.

        Long runs pool consecutive calls and keep the worst values: see
        `Thinning`.

        Args:
            step: Int. The number of the training batch.
            table: Array `[layers, metrics]`.
            layers: List of strings. The layer of each row.
            metrics: Dict from column names to `"min"` or `"max"`, whichever is
                worse.
            family: String. `schema.HEAT`, or `schema.ERRORS` for the errors of
                diagnoses.
        """
        table = np.asarray(table, np.float32)
        if not self._events.ours:
            return
        with self._lock:
            heat = self._heat[family]
            ready = heat.add(step, table, list(layers), dict(metrics))
            self._write_heat(family, ready)

    def event(self, step: int, event: Mapping) -> None:
        """Writes an event to `events.jsonl`.

        Args:
            step: Int. Number of the training batch of the event. Several
                events may share a step, and an event may come late.
            event: Dict for JSON. Non-finite numbers become strings.

        Raises:
            TypeError: If a value cannot be encoded as JSON.
        """
        _tell(self.story, step, event)
        if event.get("kind") in schema.PRECISION_CHANGES:
            # Measurements before and after a change must not be pooled.
            self._write_waiting()
        line = {**event, "step": step, "wall_time": _clock.wall()}
        self._add(step, schema.EVENTS, [line])

    def layout(self, step: int, charts: Mapping) -> None:
        """Writes the charts of the Custom Scalars tab.

        Args:
            step: Int. Number of the training batch.
            charts: Dict category -> dict chart title -> list of tags, each a
                regular expression.
        """
        self._write_standing("layout", step, [summaries.layout(charts)])

    def settings(
        self,
        values: Mapping[str, str | float | bool],
        names: Mapping[str, type],
        metrics: Mapping[str, str],
    ) -> None:
        """Writes the settings of this run, for the HParams tab.

        Args:
            values: Dict name -> string, number or boolean.
            names: Dict from all possible names to the types of their values.
            metrics: Dict from tags to titles. The tab shows the last value of
                each of these curves.
        """
        written = [
            summaries.experiment(names, metrics),
            summaries.settings(values),
        ]
        self._write_standing("settings", self.next_step, written)

    def close(self) -> None:
        """Closes the files."""
        try:
            self._write_waiting()
        finally:
            try:
                self._events.close()
                for file in self._files.values():
                    file.close()
            except OSError as error:  # Network disks may report errors now.
                self._miss(self.next_step, error)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _write_standing(self, name, step, values, tables=None):
        self._standing[name] = step, values, tables or {}
        self._draw(step, values)
        for table, row in (tables or {}).items():
            self._add(step, table, [row])

    def _write_waiting(self):
        if not self._events.ours:
            return
        with self._lock:
            for family, heat in self._heat.items():
                self._write_heat(family, heat.rest())

    def _write_heat(self, family, ready):
        for step, table, columns in ready:
            known, name = self._measured.get(family, (None, ""))
            if known != columns:
                name = f"{family}_{next(self._numbers)}.bin"
                self._measured[family] = columns, name
                self._add(step, family, [{"file": name, **columns}])
            record = np.empty(1, schema.record_dtype(*table.shape))
            record["step"], record["values"] = step, table.T
            self._append(step, name, record.tobytes())

    def _add(self, step, table, rows):
        """Adds rows to a table."""
        self._append(step, f"{table}.jsonl", _lines(rows))

    def _append(self, step, name, data):
        self._send(step, len(data), lambda: self._file(name).write(data))

    def _file(self, name):
        if name not in self._files:
            is_lines = name.endswith(".jsonl")
            path = os.path.join(self.folder, name)
            self._files[name] = (open_lines if is_lines else AppendFile)(path)
        return self._files[name]

    def _draw(self, step, values):
        """Writes values for TensorBoard."""
        size = sum(value.tensor.ByteSize() for value in values)
        self._send(step, size, lambda: self._events.write(step, values))

    def _send(self, step, size, work):
        """Performs all waiting writes and `work`, or queues `work`."""
        if not self._events.ours:
            return
        with self._lock:
            try:
                try:
                    self._backlog.write(size, work)
                except FileNotFoundError as error:
                    self._miss(step, error)
                    self._restart()
                    self._backlog.flush()
            except OSError as error:
                self._miss(step, error)
                return
            if self._gap:
                gap, self._gap = self._gap, None
                lost, self._backlog.lost = self._backlog.lost, 0
                if lost:  # Repeat the descriptions of files, which may be lost.
                    self._measured.clear()
                self.event(step, {"kind": "log_gap", **gap, "lost": lost})

    def _restart(self):
        """Continues in new files after somebody removed the old ones."""
        kept = self._files[schema.EVENTS_FILE]
        if kept.removed:
            self.folder, kept = claim_folder(self._log_dir)
        for file in {*self._files.values()} - {kept}:
            file.close()
        self._files = {schema.EVENTS_FILE: kept}
        self._measured.clear()
        self._events.restart(self.folder)
        for step, values, tables in self._standing.values():
            self._events.write(step, values)
            for table, row in tables.items():
                self._file(f"{table}.jsonl").write(_lines([row]))

    def _miss(self, step, error):
        """Notes the start of a gap in the log, and warns once."""
        if not self._gap:
            self._gap = {"from_step": step, "reason": error.strerror}
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The log in {self.folder!r} could not be written at step "
                f"{step} ({error.strerror}). Training continues. Up to "
                f"{LIMIT >> 20} MiB of data wait until writing works again.",
                UserWarning,
                stacklevel=3,
            )


def _lines(rows):
    return "".join(f"{to_json(row)}\n" for row in rows).encode()


def _tell(story, step, event):
    """Keeps an event if the headline needs it."""
    if event.get("kind") in STORY:
        story.append({**event, "step": step})


class NoLog:
    """A `RunLog` that discards everything."""

    writes = False
    next_step = fits = 0
    counts = {}
    folder = ""

    def __init__(self):
        self.story = []

    def event(self, step, event):
        """Keeps an event if the headline needs it."""
        _tell(self.story, step, event)

    def _ignore(self, *args, **options):
        pass

    scalars = text = layers = layout = _ignore
    heat = histograms = settings = rows = _ignore

    def close(self):
        """Does nothing, because no file is open."""
