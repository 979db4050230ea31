"""A report for notebooks."""

from keras_mixprec._html import element, joined, table
from keras_mixprec.analysis.doctor.report_text import (
    milliseconds,
    ratio,
    self_test_line,
    shown_formats,
    size,
    title,
)


def page(found: dict) -> str:
    """Returns a fragment of HTML.

    Args:
        found: Dict, as `DoctorReport.to_dict` returns.
    """
    parts = [
        element("h3", title(found)),
        *map(_device, {d["name"]: d for d in found["devices"]}.values()),
        _speed(found["speed"]),
        _paragraph("Self-test", self_test_line(found["self_test"])),
        _findings(found["findings"]),
        _auto(found["recommendation"]),
        _pairs("Versions", found["versions"].items()),
        _pairs(
            "Settings", ((s["name"], s["value"]) for s in found["settings"])
        ),
    ]
    return element("div", *parts)


def _device(device):
    rows = [
        (format, s["status"], s["note"], _link(s["source"]))
        for format, s in device["formats"].items()
    ]
    head = "format", "status", "why", "source"
    return joined(element("p", size(device)), table(head, rows))


def _speed(rows):
    if not rows:
        return ""
    formats = shown_formats(rows)
    head = ("forward and backward", "size", "mode", "float32", *formats)
    return table(
        head,
        [
            (
                row["operation"],
                row["size"],
                row["mode"],
                milliseconds(row),
                *(ratio(row, format) for format in formats),
            )
            for row in rows
        ],
    )


def _findings(findings):
    rows = [
        (f["level"], f["text"], f["fix"], _link(f["evidence"]))
        for f in findings
    ]
    return table(("level", "finding", "fix", "evidence"), rows) if rows else ""


def _auto(recommendation):
    if recommendation is None:
        return ""
    text = f"{recommendation['policy']}: {recommendation['reason']}"
    return _paragraph('"auto" is', text)


def _pairs(head, pairs):
    return _paragraph(head, ", ".join(f"{a} {b}" for a, b in pairs))


def _paragraph(head, text):
    return element("p", element("b", head), " ", text) if text else ""


def _link(text):
    if not text.startswith("https://"):
        return text
    return element("a", text, href=text)
