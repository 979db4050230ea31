"""The doctor's report, as text, dict and JSON."""

import dataclasses
import datetime
import json
from collections import Counter
from typing import Any

from keras_mixprec import _clock
from keras_mixprec._html import element
from keras_mixprec.formats import fill_screen, format_bytes, text_table

SCHEMA = 1

_MARKS = {"error": "ERROR", "warning": "warning"}
_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX"}
_SPEEDS = ("tf32", "bfloat16", "float16")


def now() -> str:
    """Returns the current time in UTC and ISO format."""
    date = datetime.datetime.fromtimestamp(int(_clock.wall()), datetime.UTC)
    return date.isoformat()


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """The report of `doctor`. Print it, or show it in a notebook.

    Attributes:
        backend: Dict: `name`, `version` (`None` if it cannot be imported),
            `status` (`"ok"`, `"missing"` or `"broken"`) and `error`.
        versions: Dict of strings.
        findings: List of dicts: `name`, `level`, `text`, `fix`, `evidence`;
            errors first.
        quick: Boolean.
        kind: String. The kind of the default devices, such as `"cuda"`, `None`
            without a backend.
        devices: List of dicts: `name`, `memory` in bytes, `capability` such
            as `"8.0"`, `architecture`, `instructions`, and `formats`, a dict
            from format to `status`, `note` and `source`.
        settings: Dict of strings. The settings that change the results or the
            speed of computing in 16 bits.
        speed: List of dicts: `operation`, `size`, `mode`, `seconds` in
            float32, `ratios` (format -> speed as a multiple of float32's) and
            `left_out` (format -> reason).
        self_test: List of dicts: `format`, `operation`, `error`, `bound`,
            `status`, `note`.
        recommendation: Dict: `policy` and `reason` of `"auto"`. `None` without
            a backend.
        cache: String, the file with the stored measurement, or `""`.
        date: String, such as `"2026-11-23T05:00:00+00:00"`.
        seconds: Float. How long the examination took.
    """

    backend: dict
    versions: dict
    findings: list
    quick: bool
    kind: str | None = None
    devices: list = dataclasses.field(default_factory=list)
    settings: dict = dataclasses.field(default_factory=dict)
    speed: list = dataclasses.field(default_factory=list)
    self_test: list = dataclasses.field(default_factory=list)
    recommendation: dict | None = None
    cache: str = ""
    date: str = dataclasses.field(default_factory=now)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """`True` if no finding has the level `"error"`."""
        return not any(f["level"] == "error" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns all attributes, and `schema`, the version of the dict."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        quick = ", quick" if self.quick else ""
        lines = [f"{self._title()} ({self.seconds:.0f} s{quick})"]
        for device in {d["name"]: d for d in self.devices}.values():
            lines += _device(device)
        versions = (f"{name} {v}" for name, v in self.versions.items())
        lines.append(_line("Versions", ", ".join(versions)))
        if self.settings:
            parts = map("=".join, self.settings.items())
            lines.append(_line("Settings", ", ".join(parts)))
        if self.speed:
            lines += _speed(self.speed)
        if self.self_test:
            lines.append(_line("Self-test", _results(self.self_test)))
        for f in self.findings:
            evidence = f" [{f['evidence']}]" if f["evidence"] else ""
            about = f"{f['text']}. Fix: {f['fix']}.{evidence}"
            lines.append(_line(_MARKS[f["level"]], about))
        if picked := self.recommendation:
            about = f"{picked['policy']}: {picked['reason']}"
            lines.append(_line('"auto" is', about))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return element("pre", str(self))

    def _title(self):
        """Returns the backend, its version and its devices."""
        name, status = self.backend["name"], self.backend["status"]
        backend = _TITLES.get(name, name)
        if status != "ok":
            return f"{backend}: {status}"
        counts = Counter(device["name"] for device in self.devices)
        shown = [f"{n} x {x}" if n > 1 else x for x, n in counts.items()]
        return f"{backend} {self.backend['version']} on {', '.join(shown)}"


def _line(head, about):
    return fill_screen(f"{head}: {about}")


def _device(device):
    memory, capability = device["memory"], device["capability"]
    parts = [
        memory and format_bytes(memory),
        capability and f"compute capability {capability}",
        device["architecture"],
        *(device["instructions"] or ()),
    ]
    if any(parts):
        yield _line("Device", ", ".join(filter(None, parts)))
    for format, support in device["formats"].items():
        source = f" [{support['source']}]" if support["source"] else ""
        yield f"  {format:9} {support['status']:9}{support['note']}{source}"


def _speed(rows):
    """Yields the table of speeds, with a column for each measured format."""
    known = {f for row in rows for f in (*row["ratios"], *row["left_out"])}
    formats = [format for format in _SPEEDS if format in known]
    table = [("Speed, float32 = 1, forward and backward", "float32", *formats)]
    for row in rows:
        seconds, ratios = row["seconds"], row["ratios"]
        time = "-" if seconds is None else f"{seconds * 1e3:.2f} ms"
        cells = [f"{ratios[f]:.2f}" if f in ratios else "-" for f in formats]
        name = f"  {row['operation']} {row['size']}, {row['mode']}"
        table.append((name, time, *cells))
    yield from ["", *text_table(table)]
    reasons = {
        f"{format} {why}"
        for row in rows
        for format, why in row["left_out"].items()
    }
    if reasons:
        yield _line("  -", "; ".join(sorted(reasons)))


def _results(results):
    """Returns the results of the self-test, in one line."""
    bad = [
        f"{r['operation']} in {r['format']} {r['status']}"
        for r in results
        if r["status"] != "right"
    ]
    if bad:
        right = len(results) - len(bad)
        return f"{right} of {len(results)} results right; {', '.join(bad)}"
    formats = ", ".join(dict.fromkeys(r["format"] for r in results))
    return f"{formats}: {len(results)} results right, within the bounds"
