"""A comparison as a picture: speed, metric and loss curves."""

import io
from typing import Any

import numpy as np

from keras_mixprec.analysis.comparison.curves import COLOURS, curves, limits
from keras_mixprec.analysis.comparison.record import Comparison


def png(record: Comparison, rows: list[dict]) -> bytes:
    """Returns the picture as PNG.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    file = io.BytesIO()
    draw(record, rows).savefig(file, format="png", dpi=110)
    return file.getvalue()


def draw(record: Comparison, rows: list[dict]) -> Any:
    """Returns the matplotlib figure; see `png`."""
    # Not pyplot: it would touch the figures of the user.
    from matplotlib.figure import Figure

    height = 1.2 + 0.35 * len(rows)
    figure = Figure(figsize=(10, height + 3.2), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(height, 3.2))
    upper, lower = parts
    speed, metric = upper.subplots(1, 2, sharey=True)
    _draw_speed(speed, rows)
    _draw_metric(metric, record, rows)
    _draw_curves(lower.subplots(), record, rows)
    return figure


def _draw_speed(axis, rows):
    axis.set_title(f"speed, {rows[0]['name']} = 1", parse_math=False)
    _draw_intervals(axis, [row["speed"] for row in rows])
    axis.axvline(1, color="#999999", linestyle=":")
    names = [row["name"] for row in rows]
    axis.set_yticks(range(len(rows)), names, parse_math=False)
    axis.invert_yaxis()


def _draw_metric(axis, record, rows):
    name, base = record["metric"], rows[0]
    axis.set_title(f"{name} minus {base['name']}'s", parse_math=False)
    _draw_intervals(axis, [row["difference"] for row in rows])
    axis.axvline(0, color="#999999", linestyle=":")
    if base["metric"] is not None and np.isfinite(base["metric"]):
        limit = record["tolerance"] * abs(base["metric"])
        limit = -limit if record["metric_higher_is_better"] else limit
        axis.axvline(limit, color="#d55e00", linestyle="--", label="tolerated")
        axis.legend(fontsize="small")


def _draw_intervals(axis, intervals):
    axis.locator_params(axis="x", nbins=5)
    for row, found in enumerate(intervals):
        if found is not None:
            colour = COLOURS[row % len(COLOURS)]
            axis.plot((found["low"], found["high"]), (row, row), color=colour)
            axis.plot(found["estimate"], row, "o", color=colour)


def _draw_curves(axis, record, rows):
    numbers = {row["name"]: number for number, row in enumerate(rows)}
    shown = curves(record)
    for name, steps, losses in shown:
        colour = COLOURS[numbers[name] % len(COLOURS)]
        axis.plot(steps, losses, color=colour, label=name)
    axis.locator_params(axis="x", integer=True)
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    if known := limits(shown):
        around = 0.05 * (known[1] - known[0])
        axis.set_ylim(known[0] - around, known[1] + around)
        for text in axis.legend(fontsize="small").get_texts():
            text.set_parse_math(False)
