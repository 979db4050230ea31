"""The log of one training run: what the monitor writes, in one place."""

import os
import threading
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from keras_mixprec import _clock
from keras_mixprec._files import check_local
from keras_mixprec.reporting import schema, summaries
from keras_mixprec.reporting.append_file import (
    LIMIT,
    Backlog,
    calls_of_fit,
    claim_folder,
)
from keras_mixprec.reporting.event_file import (
    EventFile,
    find_end,
)
from keras_mixprec.reporting.facts import Story
from keras_mixprec.reporting.layer_tables import Chunks, LayerTables
from keras_mixprec.reporting.text_formats import to_json


class RunLog:
    """Writes a training run to `<log_dir>/mixprec`, for TensorBoard and people.

    Every call is on disk when it returns, but for the heat of a long run, of
    which up to an interval waits for more. It may come from any thread, and
    does nothing in a forked child. A second run into the same `log_dir` goes
    into a file of its own behind the first; it has to count its steps on from
    `next_step`, because TensorBoard deletes what it is shown twice. While
    another run is being written there, in any process, it goes into a folder
    of its own beside that one, `mixprec_2` and so on.

    Once it is open, no call fails because of the disk. What cannot be written
    (the disk is full) waits, 16 MiB of it, and is written by the first call
    that succeeds. Files that are removed are started again. Either is warned
    of once, and an event `log_gap` says what was lost.

    Args:
        log_dir: String or path-like. A local folder; created if missing.

    Raises:
        TypeError: If `log_dir` is no path.
        ValueError: If it is a URL.
        OSError: If it cannot be written to.

    Attributes:
        folder: String. `<log_dir>/mixprec`, or `mixprec_2` and so on.
        next_step: Int. The first step this run may write curves of; 0 in a
            new folder. Where an earlier run ended, at the step before, this
            one begins.
        counts: Dict from the tags of counters to what earlier runs in the
            folder had counted in the end.
        fits: Int. How many calls of `fit` the folder has already.
        story: `Story` of this run, for the closing sentence.
        writes: Boolean. Whether it is a log at all, `True`.

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
        self.story = Story()
        try:
            self.folder, self._lines = claim_folder(log_dir)
            end = find_end(self.folder)
            self.fits = calls_of_fit(self.folder)
            self._events = EventFile(self.folder, end.next_step)
        except OSError as error:
            raise OSError(
                error.errno,
                "`log_dir` must be a folder that can be written to "
                f"({error.strerror}). Choose another or fix its permissions. "
                "Received: log_dir",
                log_dir,
            ) from error
        self.next_step, self.counts = end.next_step, end.counts
        self._next_chunks = end.next_chunks
        self._chunks = {}
        self._heat = {
            family: LayerTables(family, end.next_chunks.get(family, 0))
            for family in (schema.HEAT, schema.ERRORS)
        }
        self._lock = threading.RLock()
        self._backlog = Backlog()
        self._gap, self._warned = None, False
        self._standing = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point of each curve.

        Args:
            step: Int. Number of the training batch, rising from `next_step`
                on. Not `optimizer.iterations`, which stands still while steps
                are skipped.
            values: Dict tag -> number, non-finite ones included.

        Raises:
            ValueError: If a tag has this or a later step already.
        """
        self._write(step, [summaries.scalar(*item) for item in values.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Writes an entry of the Text tab; steps rise as in `scalars`."""
        self._write(step, [summaries.text(tag, markdown)])

    def histogram(self, step: int, tag: str, bins: np.ndarray) -> None:
        """Writes a histogram; steps rise as in `scalars`.

        Args:
            step: Int. Number of the training batch.
            tag: String.
            bins: Array `[k, 3]` of left edge, right edge, count.
        """
        self._write(step, [summaries.histogram(tag, bins)])

    def layers(self, step: int, table: Sequence[Mapping]) -> None:
        """Writes which dtype each layer computes in, at start and on change.

        Args:
            step: Int. Number of the training batch.
            table: List of dicts with the same keys, one per layer.
        """
        self._standing["layers"] = values = summaries.layers(table)
        self._write(step, values)

    def scale_rows(self, step: int, rows: np.ndarray, optimizer="") -> None:
        """Writes how the loss scale went since the last call, as `rows` does.

        Args:
            step: Int. Number of the training batch at which this is written.
            rows: Array `[n, 4]` of step, loss scale, non-finite count and
                iterations, by rising step.
            optimizer: String. Which of several it is the scale of. Defaults
                to `""`, for an only one.
        """
        family, columns = schema.scale_family(optimizer), schema.SCALE_COLUMNS
        size = schema.ROWS_PER_CHUNK
        self.rows(step, family, rows, columns, size, optimizer=optimizer)

    def rows(self, step: int, family: str, rows, columns, size, **content):
        """Writes rows of numbers of the run, to be read back as one table.

        Args:
            step: Int. Number of the training batch at which this is written.
            family: String, what `schema` calls such rows.
            rows: Array `[n, len(columns)]`.
            columns: Tuple of strings.
            size: Int. Rows of a chunk.
            **content: What a reader has to know beside the columns.

        Raises:
            ValueError: If `rows` has another shape.
        """
        # float64: a float32 counts steps only up to 2**24.
        rows = np.asarray(rows, np.float64)
        if rows.ndim != 2 or rows.shape[1] != len(columns):
            raise ValueError(
                f"`rows` must have the columns {columns}. "
                f"Received: rows of shape {rows.shape}"
            )

        def build(tag, rows):
            return summaries.numbers(
                tag, np.stack(rows), columns=columns, **content
            )

        self._extend(step, family, size, rows, build)

    def heat(
        self,
        step: int,
        table: np.ndarray,
        layers: Sequence[str],
        metrics: Mapping[str, str],
        family: str = schema.HEAT,
    ) -> None:
        """Writes what was measured of each layer; steps rise as in `scalars`.

        A long run has ever more calls in a row written, of which it keeps the
        worst: see `Thinning`.

        Args:
            step: Int. Number of the training batch.
            table: Array `[layers, metrics]`.
            layers: List of the paths of the rows.
            metrics: Dict from the names of the columns to `"min"` or `"max"`,
                whichever is the worse.
            family: String. `schema.HEAT`, or `schema.ERRORS` for the errors
                that diagnoses find.

        Raises:
            ValueError: If `table` has another shape.
        """
        table = np.asarray(table, np.float32)
        if table.shape != (len(layers), len(metrics)):
            raise ValueError(
                "`table` must have a row for each of `layers` and a column "
                f"for each of `metrics`. Received: table of shape "
                f"{table.shape} for {len(layers)} layers and {len(metrics)} "
                "metrics"
            )
        with self._lock:
            heat = self._heat[family]
            ready = heat.add(step, table, list(layers), dict(metrics))
            self._write_heat(ready)

    def event(self, step: int, event: Mapping) -> None:
        """Writes something that happened, here and to `events.jsonl`.

        Args:
            step: Int. Number of the training batch it happened at. Several
                events may share one and an event may be reported late.
            event: Dict, JSON-able but for non-finite numbers, which become
                strings.

        Raises:
            TypeError: If JSON has no form for a value.
        """
        self.story.add(step, event)
        if event.get("kind") in schema.PRECISION_CHANGES:
            # What was measured of other dtypes is not pooled with the rest.
            self._write_waiting()
        line = to_json({**event, "step": step, "wall_time": _clock.wall()})
        size, build = schema.EVENTS_PER_CHUNK, summaries.strings
        if self._events.ours:
            data = f"{line}\n".encode()
            with self._lock:
                self._extend(step, schema.EVENTS, size, [line], build)
                self._send(step, len(data), lambda: self._lines.write(data))

    def layout(self, step: int, charts: Mapping) -> None:
        """Writes, once, which curves the Custom Scalars tab draws together.

        Args:
            step: Int. Number of the training batch.
            charts: Dict category -> dict chart title -> list of tags, each a
                regular expression.
        """
        self._standing["layout"] = values = [summaries.layout(charts)]
        self._write(step, values)

    def settings(
        self,
        values: Mapping[str, str | float | bool],
        names: Mapping[str, type],
        metrics: Mapping[str, str],
    ) -> None:
        """Writes what distinguishes this run from others, for the HParams tab.

        Args:
            values: Dict name -> string, number or boolean.
            names: Dict from the names that any run may have to the types of
                their values.
            metrics: Dict from the tags of curves whose last values the tab
                shows to their titles.
        """
        self._standing["settings"] = written = [
            summaries.experiment(names, metrics),
            summaries.settings(values),
        ]
        self._write(self.next_step, written)

    def close(self) -> None:
        """Closes the files; nothing can be written any more."""
        try:
            self._write_waiting()
        finally:
            try:
                self._events.close()
                self._lines.close()
            except OSError as error:  # Some network disks say it only now.
                self._miss(self.next_step, error)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _extend(self, step, family, size, entries, build):
        if not self._events.ours:
            return
        with self._lock:
            if family not in self._chunks:
                index = self._next_chunks.get(family, 0)
                self._chunks[family] = Chunks(family, size, index)
            if changed := self._chunks[family].extend(entries):
                values = [build(*chunk) for chunk in changed]
                self._send(
                    step,
                    _bytes(values),
                    lambda: self._events.replace(step, values),
                )

    def _write_waiting(self):
        if not self._events.ours:
            return
        with self._lock:
            for heat in self._heat.values():
                self._write_heat(heat.rest())

    def _write_heat(self, tables):
        for step, tag, table, content in tables:
            self._write(step, [summaries.numbers(tag, table, **content)])

    def _write(self, step, values):
        if self._events.ours:
            with self._lock:
                self._send(
                    step,
                    _bytes(values),
                    lambda: self._events.write(step, values),
                )

    def _send(self, step, size, work):
        """Writes this, and what waits, or lets it wait."""
        try:
            try:
                self._backlog.write(size, work)
            except FileNotFoundError as error:
                self._miss(step, error)
                self._restart(step)
                self._backlog.flush()
        except OSError as error:
            self._miss(step, error)
            return
        if self._gap:
            gap, self._gap = self._gap, None
            lost, self._backlog.lost = self._backlog.lost, 0
            self.event(step, {"kind": "log_gap", **gap, "lost": lost})

    def _restart(self, step):
        """Goes on in new files, after somebody removed those there were."""
        if self._lines.removed:
            self.folder, self._lines = claim_folder(self._log_dir)
        self._events.restart(self.folder)
        for values in self._standing.values():
            self._events.replace(step, values)

    def _miss(self, step, error):
        """Takes note that this cannot be written now."""
        if not self._gap:
            self._gap = {"from_step": step, "reason": error.strerror}
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The log in {self.folder!r} could not be written at step "
                f"{step} ({error.strerror}). Training goes on; the log follows "
                f"when it can, or is lost beyond {LIMIT >> 20} MiB.",
                UserWarning,
                stacklevel=3,
            )


def _bytes(values):
    return sum(value.tensor.ByteSize() for value in values)


class NoLog:
    """A `RunLog` that discards everything."""

    writes = False
    next_step = fits = 0
    counts = {}
    folder = ""

    def __init__(self):
        self.story = Story()

    def event(self, step, event):
        """Keeps what the closing sentence is made of."""
        self.story.add(step, event)

    def _ignore(self, *args, **options):
        pass

    scalars = text = layers = layout = _ignore
    heat = histogram = scale_rows = settings = rows = _ignore

    def close(self):
        """Nothing is open."""
