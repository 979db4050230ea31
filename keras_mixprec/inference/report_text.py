"""A conversion as text of a screen, and as HTML."""

import math
from collections.abc import Iterator

from keras_mixprec import _html
from keras_mixprec._html import element, table
from keras_mixprec.formats import (
    SCREEN_WIDTH,
    fill_screen,
    format_bits,
    format_bytes,
    format_count,
    format_digits,
    format_share,
    printable,
)
from keras_mixprec.inference.exports import KEPT

# Layers that a screen has room for, those with the least headroom first.
_SHOWN = 20

# Layers that are named with a reason that they have in common.
_NAMED = 4

_HEADS = ("layer", "policy", "weights", "largest", "headroom", "reason")


def text(report) -> str:
    """Returns it.

    Args:
        report: A `ConversionReport`.
    """
    rows = sorted(report.layers, key=_urgency)
    # The reasons, which may be long, are below.
    table = [_HEADS[:-1], *(_cells(row)[:-1] for row in rows[:_SHOWN])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(map(str.ljust, line, widths)).rstrip()[:SCREEN_WIDTH]
        for line in table
    ]
    if len(rows) > _SHOWN:
        lines.append(f"... and {len(rows) - _SHOWN} more")
    reasons = [fill_screen(line) for line in _reasons(rows)]
    lines += ["", *reasons] if reasons else []
    said = map(fill_screen, sentences(report))
    return printable("\n".join([*said, "", *lines]))


def _reasons(rows):
    """Each reason once, with the layers that have it."""
    paths: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            paths.setdefault(row["reason"], []).append(row["path"])
    for reason, found in paths.items():
        more = len(found) - _NAMED
        rest = f" and {more} more" if more > 0 else ""
        yield f"{', '.join(found[:_NAMED])}{rest}: {reason}"


def sentences(report) -> Iterator[str]:
    """Yields what happened, and what it brings and costs.

    Args:
        report: A `ConversionReport`.
    """
    wide = report.wide_layers
    kept = f"{len(wide)} of {format_count(len(report.layers), 'layer')}"
    yield f"Converted to {report.policy}: {kept} compute in float32."
    yield _size(report.size)
    yield _latency(report.latency)
    yield from (_drift(row, report.tolerance) for row in report.drift)
    if report.metric:
        before, after = report.metric["before"], report.metric["after"]
        yield (
            f"{report.metric['name']}: {before:.6g} in float32, {after:.6g} "
            "converted."
        )
    yield from report.notes
    if report.exports:
        formats = [n for n, what in report.exports.items() if what == KEPT]
        yield (
            f"`model.export` keeps this as {' and '.join(formats)}; of the "
            "other formats see `exports` of the report."
        )


def _size(size):
    before, after = size["before"], size["after"]
    share = after / before if before else 1.0
    return (
        f"Weights: {format_bytes(before)} before, {format_bytes(after)} now "
        f"({format_share(share)})."
    )


def _latency(latency):
    before, after = latency["before"] * 1e3, latency["after"] * 1e3
    pairs = format_count(latency["pairs"], "pair")
    return (
        f"A batch takes {format_digits(before)} ms in float32, "
        f"{format_digits(after)} ms converted: {latency['speedup']:.2f} times "
        f"as fast (median of {pairs})."
    )


def _drift(row, tolerance):
    if row["nonfinite"]:
        numbers = format_count(row["nonfinite"], "number")
        return f"Drift of {row['output']}: {numbers} not finite."
    line = (
        f"Drift of {row['output']}: {row['relative']:.2g} of float32's norm "
        f"({tolerance:g} is tolerated), at most {row['largest']:.2g} and "
        f"{row['mean']:.2g} in the mean, of numbers up to "
        f"{format_digits(row['scale'])}"
    )
    if row["top1_agreement"] is not None:
        same = row["top1_agreement"]
        line += (
            f"; the same class, or output, the largest in {format_share(same)}"
        )
    return f"{line}."


def _urgency(row):
    bits = row["headroom_bits"]
    return row["policy"] != "float32", math.inf if bits is None else bits


def _cells(row):
    largest, bits = row["largest"], row["headroom_bits"]
    return (
        row["path"],
        row["policy"],
        format_bytes(row["bytes"]),
        "-" if largest is None else f"{largest:.3g}",
        "-" if bits is None else format_bits(bits),
        row["reason"],
    )


def fragment(report) -> str:
    """Returns what a notebook shows.

    Args:
        report: A `ConversionReport`.
    """
    said = (element("li", sentence) for sentence in sentences(report))
    rows = table(_HEADS, map(_cells, report.layers))
    return element("div", element("ul", *said), rows)


def page(report) -> str:
    """Returns a page of its own.

    Args:
        report: A `ConversionReport`.
    """
    return _html.page("Conversion for inference", fragment(report))
