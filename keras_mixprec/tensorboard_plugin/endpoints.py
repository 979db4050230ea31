"""Answers the requests of the page, with and without TensorBoard.

| route | answer |
|---|---|
| `data/runs` | the runs |
| `data/summaries` | a row for each run, `unread` if the run is not read yet |
| `data/run?run=` | a run without its measurements by step |
| `data/heat?run=&metric=&columns=` | a metric of all layers by step |
| `data/histogram?run=&layer=&part=` | exponents of a layer by step |
| `data/what_if?run=` | a prediction for each layer and format, and plans |
| `static/page.js`, `static/style.css` | the page |
"""

import contextlib
import functools
import json
from collections.abc import Mapping
from typing import NamedTuple

from keras_mixprec import _clock
from keras_mixprec.reporting.cards import overview
from keras_mixprec.reporting.layer_tables import MAX_COLUMNS
from keras_mixprec.reporting.report_page import bundle, static
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles, find_runs
from keras_mixprec.reporting.runs import row_of
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.reporting.what_if import what_if_of

# The maximum length of the name of a run or a layer, in characters.
_LONGEST = 4096

# The number of answers to keep. The page repeats requests every few seconds.
_KEPT = 16

# After this many seconds, the server sends the table of runs, even if some rows
# are not read yet.
_PATIENCE = 0.5

_JSON = "application/json"
_BINARY = "application/octet-stream"


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        body: Bytes.
        content_type: String.
    """

    body: bytes
    content_type: str


class RefusedError(Exception):
    """A request that is answered with an error.

    Args:
        status: Int. The HTTP status.
        message: String for the client.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def check_method(method: str) -> None:
    """Raises if the method of a request is neither GET nor HEAD."""
    if method not in ("GET", "HEAD"):
        text = "Only GET and HEAD are allowed"
        raise RefusedError(405, f"{text}. Received: {method[:80]}")


class Endpoints:
    """Answers the requests of the page, in any thread.

    Args:
        folders: Dict from names to folders with runs. A single folder may have
            the name `""`. Folders are read again for each request.
    """

    def __init__(self, folders: dict[str, str]):
        self._folders = folders
        # Keep the folders of runs, because a walk through all folders takes
        # time.
        self._runs: dict[str, str] = {}
        self._rows: dict[str, tuple] = {}
        # Set the content types here. On Windows, `mimetypes` reads the
        # registry, which may call a script text/plain. Browsers do not load
        # such a script.
        self._files = {
            "page.js": (f"{bundle()}\nexport {{ render }};", "text/javascript"),
            "style.css": (static("style.css"), "text/css"),
        }

    def static(self, name: str) -> Answer:
        """Returns a file of the page.

        Raises:
            RefusedError: If there is no such file.
        """
        if name not in self._files:
            raise RefusedError(404, "No such file")
        text, content_type = self._files[name]
        return Answer(text.encode(), content_type)

    def listed(self) -> list[dict]:
        """Returns `RunFiles.listed` of each run."""
        # TensorBoard answers on several threads, which may replace `_runs`.
        runs = self._runs = {
            f"{name}/{run}" if name else run: path
            for name, folder in self._folders.items()
            for run, path in find_runs(folder).items()
        }
        found = []
        for run, path in runs.items():
            with contextlib.suppress(OSError):  # Skip a log that was removed.
                found.append(RunFiles(path).listed(run))
        return found

    def data(self, name: str, query: Mapping[str, str]) -> Answer:
        """Returns the answer of a route.

        Args:
            name: String, one of `ROUTES`.
            query: Dict of strings.

        Raises:
            RefusedError: If the route, the run or the query is wrong.
        """
        if name == "runs":
            return Answer(to_json(self.listed()).encode(), _JSON)
        if name == "summaries":
            return self._summaries()
        if name not in _ANSWERS:
            raise RefusedError(404, "No such route")
        run = _argument(query, "run")
        try:
            log = self._open(run)
            return _answer(name, run, log, tuple(sorted(query.items())))
        except OSError as error:
            raise RefusedError(404, "The log was removed.") from error

    def _open(self, run):
        if run not in self._runs:
            self.listed()
        path = self._runs.get(run)
        if path is None:
            raise RefusedError(404, f"No such run. Received: run={run!r}")
        log = RunFiles(path)
        if log.listed(run)["newer_schema"]:
            raise RefusedError(
                400,
                "A newer version of keras_mixprec wrote this run. Update "
                "keras_mixprec to read it.",
            )
        return log

    def _summaries(self):
        """Returns a row for each run, marked if the run is not read yet."""
        ends, rows = _clock.now() + _PATIENCE, []
        has_read = False
        for listed in self.listed():
            run, written = listed["run"], listed["written"]
            if listed["newer_schema"]:
                continue
            # Do not read a run without new data again.
            known, row = self._rows.get(run, (None, {"run": run}))
            # Each request reads at least one run, so that the page gets all
            # rows in the end.
            if known != written and (not has_read or _clock.now() < ends):
                has_read = True
                try:
                    log = self._open(run)
                    row = json.loads(to_json(row_of(Run(run, log))))
                except (RefusedError, OSError):  # Skip a removed log.
                    continue
                known = written
                self._rows[run] = log.written, row
            rows.append(row if known == written else row | {"unread": True})
        return Answer(json.dumps(rows).encode(), _JSON)


@functools.lru_cache(_KEPT)
def _answer(name, run, log, query):
    # Keep the tables of a run between requests for heatmaps, because users
    # switch between metrics.
    read = _kept if name == "heat" else Run
    return _ANSWERS[name](read(run, log), dict(query))


_kept = functools.lru_cache(2)(Run)


def _overview(run, query):
    return Answer(to_json(overview(run)).encode(), _JSON)


def _heat(run, query):
    columns = _argument(query, "columns")
    if not columns.isdecimal() or not 0 < int(columns[:9]) <= MAX_COLUMNS:
        raise RefusedError(
            400,
            f"`columns` must be an integer from 1 to {MAX_COLUMNS}. "
            f"Received: columns={columns[:80]!r}",
        )
    metric = _argument(query, "metric")
    return Answer(_found(run.heat_bytes, metric, int(columns)), _BINARY)


def _histogram(run, query):
    layer, part = _argument(query, "layer"), _argument(query, "part")
    found = _found(run.histogram, layer, part)
    return Answer(to_json(found).encode(), _JSON)


def _what_if(run, query):
    return Answer(to_json(what_if_of(run)).encode(), _JSON)


_ANSWERS = {
    "run": _overview,
    "heat": _heat,
    "histogram": _histogram,
    "what_if": _what_if,
}
ROUTES = ("runs", "summaries", *_ANSWERS)


def _argument(query, name):
    value = query.get(name)
    if not value or len(value) > _LONGEST:
        raise RefusedError(
            400,
            f"`{name}` must be given, with at most {_LONGEST} characters. "
            f"Received: {name}={(value or '')[:80]!r}",
        )
    return value


def _found(read, *arguments):
    try:
        return read(*arguments)
    except KeyError as error:
        raise RefusedError(404, f"The run does not have {error}.") from error
