"""`ComparisonResult`: the result of `compare_precisions`, as text and HTML."""

import json
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from keras_mixprec import _html, formats
from keras_mixprec._files import check_regular, write_json
from keras_mixprec._html import HtmlReport, element
from keras_mixprec.analysis.comparison import verdicts
from keras_mixprec.reporting.text_formats import plain

KIND, VERSION = "comparison", 1
FORMAT = f"keras_mixprec.{KIND}"

# JSON has no NaN and no infinity, so files hold strings in their place, as run
# logs do.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# Figures that are shown below the table: key in a row, title, unit.
_LISTED = (
    ("samples_per_second", "Samples per second", ""),
    ("compile_seconds", "Compilation and first use", " s"),
    ("energy_joules_per_sample", "Energy for a sample", " J"),
)

_MEASURED_BY = {
    "device": "the device memory that the backend counts",
    "compiled_program": "the compiled program's, as the compiler reports it",
    "process": "the resident memory of each policy's own process",
}


class Best(NamedTuple):
    """The choice of `ComparisonResult.best`.

    Attributes:
        policy: String, as `policies` of `compare_precisions` takes it, or a
            `PrecisionPlan`. A plan comes without its settings, which `reason`
            names.
        reason: String. Why this policy is the best.
    """

    policy: Any
    reason: str


class ComparisonResult(HtmlReport):
    """The measurements of `compare_precisions`, and their verdicts.

    Print it for text. A notebook shows a table.

    Args:
        record: Dict of measurements, such as the `record` of a result.

    Attributes:
        record: As given. docs/files.md has its keys.
        rows: List of dicts, one for each policy, computed from the record.

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
        self.record = check(record, "record")
        self.rows = rows(self.record)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict with the keys `record` and `rows`."""
        return {"record": self.record, "rows": self.rows}

    def save(self, path: str | os.PathLike) -> None:
        """Writes `to_dict()` as JSON.

        Args:
            path: String or path-like. An existing file is replaced.

        Raises:
            OSError: If the file cannot be written. An existing file is kept.
        """
        write_json(path, plain(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ComparisonResult":
        """Loads a result from a file.

        Args:
            path: String or path-like. A file that `save` or
                `compare_precisions(resume=path)` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is damaged, has a different version, or is
                not a comparison.
        """
        check_regular(path)
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                "The file is damaged: it is not JSON. "
                f"Received: path={str(path)!r} ({error})"
            ) from error
        return cls(check(from_json(content), str(path)))

    def best(self) -> Best:
        """Returns the fastest policy within tolerance, and why.

        A policy qualifies if its whole confidence intervals show that the
        policy is faster than the reference and within tolerance. If no policy
        qualifies, the reference is the best.

        Returns:
            A named tuple of `policy`, as `policies=` takes it, and `reason`, a
            sentence.
        """
        return pick(self.record, self.rows)

    def to_html(self) -> str:
        """Returns an HTML page that needs no network and no server."""
        versions = " ".join(map(" ".join, self.record["versions"].items()))
        about = f"Started {self.record['time']}. Versions: {versions}."
        body = _html.joined(self._repr_html_(), element("p", about))
        return _html.page(self._title(), body)

    def __str__(self):
        lines = [
            formats.fill_screen(self._title()),
            "",
            *formats.text_table(self._table()),
            "",
        ]
        lines += map(formats.fill_screen, self._remarks())
        return formats.printable(
            "\n".join([*lines, formats.fill_screen(self._best())])
        )

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
        """Returns the backend, device, steps and seeds, in one line."""
        record = self.record
        name = record["backend"]
        backend = f"{name} {record['versions'].get(name, '')}".strip()
        steps = formats.format_count(record["steps"], "step")
        samples = formats.format_count(record["batch_size"], "sample")
        seeds = ", ".join(map(str, record["seeds"]))
        which = "seeds" if len(record["seeds"]) > 1 else "seed"
        return (
            f"{backend} on {record['device']}: {steps} of {samples}, "
            f"{which} {seeds}"
        )

    def _table(self):
        """Returns the column heads, and the cells of each row."""
        metric = self.record["metric"]
        heads = ["", "step", "speed", "memory", "16 bits", metric, "verdict"]
        return [heads, *map(_cells, self.rows)]

    def _remarks(self) -> Iterator[str]:
        """Yields the sentences below the table."""
        record, shown = self.record, self.rows
        base, metric = shown[0]["name"], record["metric"]
        count = sum(len(s["step_seconds"]) for s in record["arms"][0]["seeds"])
        sure = [row["speed"]["confidence"] for row in shown if row["speed"]]
        pairs = formats.format_count(count, "pair")
        yield (
            f"Speed is {base}'s step time divided by the policy's: the median "
            f"of {pairs} of timed blocks, with its "
            f"{min(sure, default=1.0):.0%} interval. {metric} is the mean ± "
            "standard deviation over seeds. The tolerance is "
            f"{shown_tolerance(record)} of {base}'s {metric}."
        )
        slower = [row["name"] for row in shown if is_slower(row)]
        if slower:
            yield f"Slower than {base}: {', '.join(slower)}."
        if any(row["speed"] and not is_known(row) for row in shown[1:]):
            yield (
                "Six timed blocks are needed to say which policy is faster. "
                "Pass more `seeds`, or more `steps` and `blocks`."
            )
        for row in shown:
            yield from _about(row)
        for key, head, unit in _LISTED:
            parts = [
                f"{row['name']} {formats.format_digits(row[key])}{unit}"
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
        "-" if memory is None else formats.format_bytes(memory),
        "-" if share is None else formats.format_share(share),
        "-" if metric is None else f"{metric:.4g}{spread}",
        row["verdict"],
    ]


def _shown_seconds(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _about(row):
    if row["why"]:
        yield f"{row['name']}: {row['verdict']}: {row['why'].rstrip('.')}."
    if row["skipped_steps"]:
        steps = formats.format_count(row["skipped_steps"], "step")
        yield (
            f"{row['name']}: {steps} skipped, which cost "
            f"{row['seconds_lost']:.2g} s."
        )
    for note in row["notes"]:
        yield f"{row['name']}: {note.rstrip('.')}."


def _memory(record):
    known = [arm for arm in record["arms"] if arm["memory"]]
    for way in dict.fromkeys(arm["memory"]["measured_by"] for arm in known):
        yield f"Memory is {_MEASURED_BY[way]}."
    for arm in known:
        parts = [
            f"{part} {formats.format_bytes(arm['memory'][f'{part}_bytes'])}"
            for part in ("weights", "slots", "activations")
            if arm["memory"][f"{part}_bytes"] is not None
        ]
        if parts:
            yield f"Memory of {arm['name']}: {', '.join(parts)}."


def rows(record: dict) -> list[dict]:
    """Returns a dict for each arm, in order.

    The speed compares each timed block of an arm with the reference's block of
    the same turn, because a busy machine slows down both.

    Args:
        record: The record of a comparison.
    """
    return [_row(arm, record) for arm in record["arms"]]


def _row(arm, record):
    reference, seeds = record["arms"][0], arm["seeds"]
    metrics = _all(arm, "metric")
    blocks = [seconds for seed in seeds for seconds in seed["step_seconds"]]
    step = statistics.median(blocks) if blocks else None
    joules = _all(arm, "energy_joules_per_sample")
    energy = None
    if joules and None not in joules:
        energy = statistics.mean(joules)
    finite = len(metrics) > 1 and all(map(math.isfinite, metrics))
    return {
        "name": arm["name"],
        "status": arm["status"],
        **verdicts.judge_metric(arm, record),
        # Do not use `fmean`, which raises an error if both inf and -inf are
        # among the metrics.
        "metric": sum(metrics) / len(metrics) if metrics else None,
        "metric_spread": statistics.stdev(metrics) if finite else None,
        "step_seconds": step,
        "speed": _speed(arm, reference),
        "samples_per_second": step and record["samples_per_step"] / step,
        # Later seeds may reuse compiled functions, so only the compile time of
        # the first seed counts.
        "compile_seconds": seeds[0]["compile_seconds"] if seeds else None,
        "memory_bytes": arm["memory"] and arm["memory"]["peak_bytes"],
        "memory_ratio": _memory_ratio(arm, reference),
        "energy_joules_per_sample": energy,
        "share_of_flops_16bit": arm["share_of_flops_16bit"],
        "skipped_steps": sum(_all(arm, "skipped_steps")),
        "seconds_lost": sum(_all(arm, "seconds_lost")),
        "notes": list(arm["notes"]),
    }


def _all(arm, key):
    return [seed[key] for seed in arm["seeds"]]


def _speed(arm, reference):
    if arm is reference:
        return verdicts.Interval(1.0, 1.0, 1.0, 1.0)._asdict()
    ratios = [
        base / seconds
        for ours, theirs in verdicts.pairs(arm, reference)
        for base, seconds in zip(
            theirs["step_seconds"], ours["step_seconds"], strict=False
        )
    ]
    return verdicts.median_interval(ratios)._asdict() if ratios else None


def _memory_ratio(arm, reference):
    ours, base = arm["memory"], reference["memory"]
    # Peaks that were measured in different ways cannot be compared.
    if not (ours and base) or ours["measured_by"] != base["measured_by"]:
        return None
    return ours["peak_bytes"] / base["peak_bytes"]


def is_known(row: dict) -> bool:
    """Returns `True` if there are enough pairs of blocks to compare speeds.

    Six pairs are enough. The range of five pairs has a confidence of only 94%.
    """
    return (
        row["speed"] is not None
        and row["speed"]["confidence"] >= verdicts.CONFIDENCE
    )


def is_slower(row: dict) -> bool:
    """Returns `True` if the whole interval is below the reference's speed."""
    return is_known(row) and row["speed"]["high"] < 1


def shown_speed(row: dict) -> str:
    """Returns the speed and its interval, or `"-"` without a speed."""
    if row["speed"] is None:
        return "-"
    values = [row["speed"][name] for name in ("estimate", "low", "high")]
    # With two digits, a slightly slower policy would be shown as 1.00.
    near = any(x != 1 and round(x, 2) == 1 for x in values)
    digits = 3 if near or values[0] < 0.1 else 2
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return middle if low == high else f"{middle} ({low}-{high})"


def shown_tolerance(record: dict) -> str:
    """Returns the tolerance in percent."""
    return f"{100 * record['tolerance']:g}%"


def pick(record: dict, rows: list[dict]) -> Best:
    """Returns the fastest arm within tolerance, else the reference.

    Args:
        record: The record of a comparison.
        rows: The result of `rows`.
    """
    allowed = [
        (row["speed"]["estimate"], index)
        for index, row in enumerate(rows)
        if row["verdict"] == verdicts.WITHIN
        and is_known(row)
        and row["speed"]["low"] > 1
    ]
    _, best = max(allowed, default=(1.0, 0))
    say = _gain if best else _no_gain
    return Best(_policy(record["arms"][best]), say(record, rows, rows[best]))


def _gain(record, rows, row):
    base = rows[0]["name"]
    seeds = formats.format_count(row["seeds"], "seed")
    return (
        f"{row['name']} trains {shown_speed(row)} times as fast as {base}. Its "
        f"{record['metric']} is within {shown_tolerance(record)} of {base}'s "
        f"for {seeds}: {row['why']}."
    )


def _no_gain(record, rows, row):
    if not rows[1:]:
        return f"{row['name']} is the only policy."
    return (
        f"{row['name']}. No other policy is both faster and within "
        f"{shown_tolerance(record)} of its {record['metric']}."
    )


def _policy(arm):
    policy = arm["policy"]
    if isinstance(policy, str):
        return "+".join([policy, *arm["settings"]])
    # Import plans late, because showing a table does not need Keras.
    from keras_mixprec.policies.plan import PrecisionPlan

    return PrecisionPlan(policy["layers"], default=policy["default"])


def check(content: Any, path: str) -> dict:
    """Returns the record in the content of a file.

    Args:
        content: The parsed JSON of a result or of a file to resume from.
        path: String. The file, for the message.

    Raises:
        ValueError: If there is no record of this version.
    """
    if isinstance(content, dict):
        content = content.get("record", content.get("found", content))
    head = {"format": FORMAT, "version": VERSION}
    if not isinstance(content, dict) or not (
        "arms" in content and head.items() <= content.items()
    ):
        raise ValueError(
            "The file is not a record of `compare_precisions` that this "
            f"version reads: `format` must be {FORMAT!r} and `version` "
            f"{VERSION}. Received: path={path!r}"
        )
    return content


def from_json(content: Any) -> Any:
    """Returns parsed JSON with non-finite numbers in place of their names."""
    if isinstance(content, dict):
        return {key: from_json(value) for key, value in content.items()}
    if isinstance(content, list):
        return [from_json(value) for value in content]
    if isinstance(content, str):
        return _NOT_FINITE.get(content, content)
    return content
