"""`ComparisonResult`: what `compare_precisions` returns, and how it is shown.

One table, and sentences that follow from it, as text of a screen and as HTML.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_mixprec import _html
from keras_mixprec._checks import check_number
from keras_mixprec._files import check_regular, write_json
from keras_mixprec._html import HtmlReport, element
from keras_mixprec.analysis.comparison.rows import (
    Best,
    is_known,
    is_slower,
    pick,
    rows,
    shown_speed,
    shown_tolerance,
)
from keras_mixprec.analysis.comparison.store import check, from_json
from keras_mixprec.formats import (
    SCREEN_WIDTH,
    fill_screen,
    format_bytes,
    format_count,
    format_digits,
    format_share,
    printable,
)
from keras_mixprec.reporting.text_formats import plain

# What the table has no column for: key of a row, head, unit.
_LISTED = (
    ("samples_per_second", "Samples per second", ""),
    ("compile_seconds", "Compiled, or first used, in", " s"),
    ("energy_joules_per_sample", "Energy of a sample", " J"),
)

_MEASURED_BY = {
    "device": "the backend's own count of its device's memory",
    "compiled_program": "what the compiled program needs, by the compiler",
    "process": "resident memory of a process of its own",
}


class ComparisonResult(HtmlReport):
    """What `compare_precisions` measured, and what follows from it.

    `str()` gives text of a screen, and a notebook shows a table.

    Args:
        record: Dict, what was measured: `result.record` of another result.

    Example:
    >>> def build():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> result = compare_precisions(
    ...     build, (np.ones((64, 4)), np.ones((64, 1))), ["float32"],
    ...     steps=4, blocks=2, seeds=1, verbose=0)
    >>> result.best().policy
    'float32'
    """

    def __init__(self, record: dict):
        self._record = check(record, "record")
        self._rows = rows(self._record)

    @property
    def record(self) -> dict[str, Any]:
        """Dict of what was measured; docs/files.md has its keys."""
        return self._record

    @property
    def rows(self) -> list[dict[str, Any]]:
        """List of what follows from it, a dict for each policy."""
        return self._rows

    def to_dict(self) -> dict[str, Any]:
        """Returns `record` and `rows` as a dict of these two."""
        return {"record": self._record, "rows": self._rows}

    def save(self, path: str | os.PathLike) -> None:
        """Writes `to_dict()` as JSON.

        Args:
            path: String or path-like. The file, replaced if it is there.

        Raises:
            OSError: If it cannot be written; the old file is left as it was.
        """
        write_json(path, plain(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ComparisonResult":
        """Returns the result in a file.

        Args:
            path: String or path-like. What `save` or
                `compare_precisions(resume=path)` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, of a newer version, or something
                else.
        """
        check_regular(path)
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                "The file is not JSON; it is damaged or was cut short. "
                f"Received: path={str(path)!r} ({error})"
            ) from error
        return cls(check(from_json(content), str(path)))

    def best(self, under: str | float = "tolerance") -> Best:
        """Returns the fastest policy within tolerance, and why.

        It is the first policy unless another is both within tolerance and
        faster: by their whole intervals, not by their estimates alone.

        Args:
            under: `"tolerance"`, that of the comparison, or a float in its
                place. Defaults to `"tolerance"`.

        Returns:
            A named tuple of `policy`, as `policies=` takes it, a
            `PrecisionPlan` where it was one, and `reason`, a sentence.

        Raises:
            TypeError: If `under` is neither.
            ValueError: If it is below 0.
        """
        if under == "tolerance":
            return pick(self._record, self._rows)
        tolerance = check_number("under", under, low=0.0)
        record = {**self._record, "tolerance": tolerance}
        return pick(record, rows(record))

    def to_html(self) -> str:
        """Returns one page that needs neither a network nor a server."""
        versions = " ".join(map(" ".join, self._record["versions"].items()))
        about = f"Begun {self._record['time']}. Versions: {versions}."
        body = _html.joined(self._repr_html_(), element("p", about))
        return _html.page(self._title(), body)

    def __str__(self):
        lines = [fill_screen(self._title()), "", *_aligned(self._table()), ""]
        lines += map(fill_screen, self._remarks())
        return printable("\n".join([*lines, fill_screen(self._best())]))

    __repr__ = __str__

    def _repr_html_(self):
        heads, *cells = self._table()
        return element(
            "div",
            element("h3", self._title()),
            element("p", self._best()),
            _html.table(heads, cells, "numbers"),
            element("ul", *(element("li", s) for s in self._remarks())),
        )

    def _best(self):
        return f"Best: {self.best().reason}"

    def _title(self):
        """What was compared on what, in one line."""
        record = self._record
        name = record["backend"]
        backend = f"{name} {record['versions'].get(name, '')}".strip()
        steps = format_count(record["steps"], "step")
        samples = format_count(record["batch_size"], "sample")
        seeds = ", ".join(map(str, record["seeds"]))
        which = "seeds" if len(record["seeds"]) > 1 else "seed"
        return (
            f"{backend} on {record['device']}: {steps} of {samples}, "
            f"{which} {seeds}"
        )

    def _table(self):
        """The heads of the columns, and the cells of each row."""
        metric = self._record["metric"]
        heads = ["", "step", "speed", "memory", "16 bits", metric, "verdict"]
        return [heads, *map(_cells, self._rows)]

    def _remarks(self) -> Iterator[str]:
        """What the table has no room for, a sentence or two each."""
        record, shown = self._record, self._rows
        base, metric = shown[0]["name"], record["metric"]
        count = sum(len(s["step_seconds"]) for s in record["arms"][0]["seeds"])
        sure = [row["speed"]["confidence"] for row in shown if row["speed"]]
        yield (
            f"Speed is {base}'s step time divided by each one's, in each of "
            f"{format_count(count, 'timed block')} that took turns: median and "
            f"interval ({min(sure, default=1.0):.0%}). {metric} is the mean ± "
            f"standard deviation over seeds; {shown_tolerance(record)} of "
            f"{base}'s is tolerated."
        )
        slower = [row["name"] for row in shown if is_slower(row)]
        if slower:
            yield f"Slower than {base}: {', '.join(slower)}."
        if any(row["speed"] and not is_known(row) for row in shown[1:]):
            yield (
                "Which is faster takes six pairs of timed blocks to say: give "
                "more `seeds`, or `steps` in more `blocks`."
            )
        for row in shown:
            yield from _about(row)
        for key, head, unit in _LISTED:
            parts = [
                f"{row['name']} {format_digits(row[key])}{unit}"
                for row in shown
                if row[key]
            ]
            if parts:
                yield f"{head}: {', '.join(parts)}."
        yield from _memory(record)


def _cells(row):
    seconds, share = row["step_seconds"], row["share_of_flops_16bit"]
    memory, metric = row["memory_bytes"], row["metric"]
    spread = f" ±{s:.2g}" if (s := row["metric_spread"]) else ""
    return [
        row["name"],
        "-" if seconds is None else _shown_seconds(seconds),
        shown_speed(row),
        "-" if memory is None else format_bytes(memory),
        "-" if share is None else format_share(share),
        "-" if metric is None else f"{metric:.4g}{spread}",
        row["verdict"],
    ]


def _shown_seconds(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _about(row):
    if row["why"]:
        yield f"{row['name']}: {row['verdict']}: {row['why'].rstrip('.')}."
    if row["skipped_steps"]:
        steps = format_count(row["skipped_steps"], "step")
        yield (
            f"{row['name']}: {steps} skipped, {row['seconds_lost']:.2g} s lost "
            "to them."
        )
    for note in row["notes"]:
        yield f"{row['name']}: {note.rstrip('.')}."


def _memory(record):
    known = [arm for arm in record["arms"] if arm["memory"]]
    for way in dict.fromkeys(arm["memory"]["measured_by"] for arm in known):
        yield f"Memory is {_MEASURED_BY[way]}."
    for arm in known:
        parts = [
            f"{part} {format_bytes(arm['memory'][f'{part}_bytes'])}"
            for part in ("weights", "slots", "activations")
            if arm["memory"][f"{part}_bytes"] is not None
        ]
        if parts:
            yield f"Memory of {arm['name']}: {', '.join(parts)}."


def _aligned(table):
    """Lines of at most 100 columns: a long name is on a line of its own."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rest = sum(widths[1:]) + 2 * len(widths[1:])
    widths[0] = min(widths[0], max(SCREEN_WIDTH - rest, 12))
    for name, *middle, last in table:
        if len(name) > widths[0]:
            yield name
            name = ""
        parts = [name.ljust(widths[0])]
        parts += map(str.rjust, middle, widths[1:-1])
        yield "  ".join([*parts, last]).rstrip()
