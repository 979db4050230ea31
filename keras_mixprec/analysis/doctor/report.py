"""What the doctor found: as text of one screen, dict and JSON."""

import dataclasses
import json
from typing import Any

from keras_mixprec._html import element
from keras_mixprec.analysis.doctor import report_text

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """What `doctor` found, printable, also in a notebook.

    Attributes:
        backend: Dict: `name`, `version` (`None` if it cannot be imported),
            `status` (`"ok"`, `"missing"` or `"broken"`) and `error`.
        kind: String, of the default devices, `None` without a backend.
        devices: List of dicts: `name`, `memory` in bytes, `capability` such
            as `"8.0"`, `architecture`, `instructions`, and `formats`, a dict
            from format to `status`, `note` and `source`.
        versions: Dict of strings.
        settings: List of dicts: `name`, `value`, `note`.
        speed: List of dicts: `operation`, `size`, `mode`, `seconds` in
            float32, `ratios` (format -> times as fast as float32) and
            `left_out` (format -> why).
        self_test: List of dicts: `format`, `operation`, `error`, `bound`,
            `status`, `note`.
        findings: List of dicts: `name`, `level`, `text`, `fix`, `evidence`;
            errors first.
        recommendation: Dict: `policy` and `reason`, what `"auto"` picks;
            `None` without a backend.
        cache: String, the file that the measurement was kept in, or `""`.
        quick: Boolean.
        date: String, such as `"2026-11-23T05:00:00+00:00"`.
        seconds: Float. How long it took.
    """

    backend: dict
    kind: str | None
    devices: list
    versions: dict
    settings: list
    speed: list
    self_test: list
    findings: list
    recommendation: dict | None
    cache: str
    quick: bool
    date: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is no finding of level `"error"`."""
        return not any(f["level"] == "error" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it, with `schema`, the number of its form."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return report_text.text(self.to_dict())

    def _repr_html_(self) -> str:
        return element("pre", str(self))
