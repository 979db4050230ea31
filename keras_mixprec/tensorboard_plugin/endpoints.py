"""What the page asks for, and the answers: the same in and beside TensorBoard.

| route | answer |
|---|---|
| `data/runs` | the runs |
| `data/summaries` | a row for each run, `unread` if it is to be read |
| `data/comparison?run=&other=` | what two runs tell of each other |
| `data/run?run=` | all of a run but its measurements by step |
| `data/heat?run=&metric=&columns=` | one metric of all layers by step |
| `data/histogram?run=&layer=&part=` | exponents of a layer by step |
| `data/ranges?run=` | the range of each layer over the run |
| `static/page.js`, `static/style.css` | the page itself |
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from keras_mixprec import _clock
from keras_mixprec.reporting.report_page import bundle, static
from keras_mixprec.reporting.run_data import MAX_COLUMNS, RunData
from keras_mixprec.reporting.run_ranges import run_ranges
from keras_mixprec.reporting.run_summary import summary
from keras_mixprec.reporting.sized_cache import SizedCache
from keras_mixprec.reporting.source import Source
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.reporting.worth import comparison, with_partners

# No name of a run or a layer is longer.
_LONGEST = 4096

# Bytes of answers to keep: the page asks for all of a run whenever it has
# grown, several readers ask for the same.
_KEPT = 1 << 26

# Seconds until rows of the table of runs are sent without those not read yet.
_PATIENCE = 0.5

_JSON = "application/json"
_BINARY = "application/octet-stream"


class Answer(NamedTuple):
    """What is sent.

    Attributes:
        body: Bytes.
        content_type: String.
    """

    body: bytes
    content_type: str


class RefusedError(Exception):
    """A question that has no answer.

    Args:
        status: Int. The HTTP status.
        message: String, for whoever asked.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Runs(Protocol):
    """The runs that there are."""

    def listed(self) -> list[dict]:
        """Returns the runs by name.

        Of each a dict of its name as `"run"`, of whether a newer version wrote
        it as `"newer_schema"`, and of when it was last written as `"written"`.
        """

    def reading(self, run: str) -> AbstractContextManager:
        """Returns what to hold while a run is read."""

    def source(self, run: str) -> Source | None:
        """Returns the log of a run, `None` if there is no such run."""


class Endpoints:
    """Answers what the page asks for.

    Safe to use from several threads.
    """

    def __init__(self):
        # One script instead of thirty, which take 0.2 s to ask for. Types are
        # not guessed by `mimetypes`, which on Windows asks the registry: a
        # module that comes as text/plain does not load.
        self._files = {
            "page.js": (f"{bundle()}\nexport {{ render }};", "text/javascript"),
            "style.css": (static("style.css"), "text/css"),
        }
        self._kept = SizedCache(_KEPT, lambda answer: len(answer.body))
        self._rows = {}
        self._answers = {
            "summary": _summary,
            "run": _overview,
            "heat": _heat,
            "histogram": _histogram,
            "ranges": _ranges,
        }

    def static(self, name: str) -> Answer:
        """Returns a file of the page.

        Raises:
            RefusedError: If there is none of that name.
        """
        if name not in self._files:
            raise RefusedError(404, "No such file")
        text, content_type = self._files[name]
        return Answer(text.encode(), content_type)

    def data(self, runs: Runs, name: str, query: Mapping[str, str]) -> Answer:
        """Returns the answer of a route.

        Args:
            runs: `Runs`.
            name: String. What follows `data/`.
            query: Dict of strings.

        Raises:
            RefusedError: If there is no such route or run, or the query is
                wrong.
        """
        if name == "runs":
            return Answer(to_json(runs.listed()).encode(), _JSON)
        if name == "summaries":
            return self._summaries(runs)
        if name == "comparison":
            found = (
                self.data(runs, "summary", {"run": _argument(query, which)})
                for which in ("run", "other")
            )
            pair = (json.loads(answer.body) for answer in found)
            return Answer(json.dumps(comparison(*pair)).encode(), _JSON)
        if name not in self._answers:
            raise RefusedError(404, "No such route")
        run = _argument(query, "run")
        try:
            with runs.reading(run):
                return self._of_run(runs, name, run, query)
        except OSError as error:
            raise RefusedError(404, "The log was removed.") from error

    def _of_run(self, runs, name, run, query):
        source = runs.source(run)
        if source is None or not source.contents:
            raise RefusedError(404, f"No such run. Received: run={run!r}")
        data = RunData(run, source)
        if data.newer_schema:
            raise RefusedError(
                400,
                "A newer version of keras_mixprec wrote this run: update it.",
            )
        key, version = (name, *sorted(query.items())), source.version
        answer = self._answers[name]
        return self._kept.get(key, version, lambda: answer(data, query))

    def _summaries(self, runs):
        """A row for each run, marked where it is still to be read."""
        ends, rows = _clock.now() + _PATIENCE, []
        has_read = False
        for listed in runs.listed():
            run, written = listed["run"], listed["written"]
            if listed["newer_schema"]:
                continue
            # A run that was not written to since is not even opened.
            known, row = self._rows.get(run, (None, {"run": run}))
            # One at least, so that all are read in the end.
            due = not has_read or _clock.now() < ends
            if known != written and due:
                has_read = True
                try:
                    answer = self.data(runs, "summary", listed)
                except RefusedError:  # Removed since it was listed.
                    continue
                row = json.loads(answer.body)
                self._rows[run] = known, row = written, row
            rows.append(row if known == written else row | {"unread": True})
        return Answer(json.dumps(with_partners(rows)).encode(), _JSON)


def _overview(data, query):
    return Answer(to_json(data.overview()).encode(), _JSON)


def _summary(data, query):
    return Answer(to_json(summary(data.outline())).encode(), _JSON)


def _heat(data, query):
    columns = _argument(query, "columns")
    if not columns.isdecimal() or not 0 < int(columns[:9]) <= MAX_COLUMNS:
        raise RefusedError(
            400,
            f"`columns` must be an integer from 1 to {MAX_COLUMNS}. "
            f"Received: columns={columns[:80]!r}",
        )
    metric = _argument(query, "metric")
    return Answer(_found(data.heat, metric, int(columns)), _BINARY)


def _histogram(data, query):
    layer, part = _argument(query, "layer"), _argument(query, "part")
    found = _found(data.histogram, layer, part)
    return Answer(to_json(found).encode(), _JSON)


def _ranges(data, query):
    return Answer(to_json(run_ranges(data, MAX_COLUMNS)).encode(), _JSON)


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
        raise RefusedError(404, f"Nothing is known of {error}") from error
