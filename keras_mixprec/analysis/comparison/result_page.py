"""A comparison as HTML: a fragment for notebooks, a page for the report."""

import math

from keras_mixprec import _html
from keras_mixprec._html import element, joined, table
from keras_mixprec.analysis.comparison.best import reason
from keras_mixprec.analysis.comparison.curves import (
    COLOURS,
    Curve,
    curves,
    limits,
)
from keras_mixprec.analysis.comparison.record import Comparison
from keras_mixprec.analysis.comparison.result_text import (
    cells,
    heads,
    remarks,
    title,
)

# Of the drawing, in its own units.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _RIGHT = 720, 240, 64, 26, 170


def page(record: Comparison, rows: list[dict]) -> str:
    """Returns a page of its own.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
    """
    about = [
        ("Begun", record["time"]),
        ("Versions", ", ".join(map(" ".join, record["versions"].items()))),
        *((name, value) for name, value in record["sources"].items() if value),
        ("Batches", f"digest {record['batches_digest']}"),
        ("Blocks", str(record["blocks"])),
    ]
    body = joined(fragment(record, rows), table(("", ""), about))
    return _html.page(title(record), body)


def fragment(record: Comparison, rows: list[dict]) -> str:
    """Returns what a notebook shows.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
    """
    return element(
        "div",
        element("h3", title(record)),
        element("p", element("b", "Best:"), " ", reason(record, rows)),
        table(heads(record), map(cells, rows), "numbers"),
        _drawing(curves(record)),
        element("ul", *(element("li", s) for s in remarks(record, rows))),
    )


def _drawing(shown: list[Curve]):
    """The loss curves, drawn without any package."""
    known = limits(shown)
    if known is None:
        return ""
    low, high = known
    end = max(curve.steps[-1] for curve in shown)

    def place(x, y):
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / end
        down = (high - min(y, high)) / (high - low)
        return across, 12 + (_HEIGHT - _BOTTOM - 12) * down

    lines = [_line(c, n, place) for n, c in enumerate(shown)]
    return element(
        "svg",
        element("title", "Loss by step"),
        _axes(place, low, high, end),
        *lines,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH,
        role="img",
        font_family="sans-serif",
        font_size=12,
        fill="currentColor",
    )


def _axes(place, low, high, end):
    (left, top), (right, bottom) = place(0, high), place(end, low)
    middle = (left + right) / 2, (top + bottom) / 2
    labels = [
        _label(left - 6, top + 4, f"{high:.3g}", "end"),
        _label(left - 6, middle[1], "loss", "end"),
        _label(left - 6, bottom + 4, f"{low:.3g}", "end"),
        _label(left, bottom + 18, "0", "middle"),
        _label(middle[0], bottom + 18, "step", "middle"),
        _label(right, bottom + 18, f"{end:,}", "middle"),
    ]
    frame = element(
        "path",
        d=f"M{left},{top}V{bottom}H{right}",
        fill="none",
        stroke="currentColor",
        stroke_opacity=".4",
    )
    return joined(frame, *labels)


def _line(curve, number, place):
    colour = COLOURS[number % len(COLOURS)]
    name, steps, losses = curve
    path = " ".join(
        "{:.1f},{:.1f}".format(*place(x, y))
        for x, y in zip(steps, losses, strict=True)
        if math.isfinite(y)
    )
    top = 20 + 18 * number
    left = _WIDTH - _RIGHT + 12
    stroke = {"fill": "none", "stroke": colour, "stroke_width": "1.5"}
    key = {"x": left, "y": top - 8, "width": 12, "height": 4}
    return joined(
        element("polyline", points=path, **stroke),
        element("rect", **key, fill=colour),
        _label(left + 18, top, name[:22], "start"),
    )


def _label(x, y, text, anchor):
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text_anchor": anchor}
    return element("text", text, **place)
