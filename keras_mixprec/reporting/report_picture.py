"""A run as a picture, for where no page is shown."""

import io
import os
import re

import numpy as np

from keras_mixprec.formats import printable
from keras_mixprec.reporting.format_limits import is_wider
from keras_mixprec.reporting.layer_tables import layer_of
from keras_mixprec.reporting.passed_on import passed_cells
from keras_mixprec.reporting.report_page import (
    COLOURS,
    category,
    headroom_colours,
    level,
)

_METRIC = "activation_headroom_bits"
_COLUMNS = 400
_MOST_LAYERS = 60

# Marks of events on the loss scale: shapes and colours of the page.
_MARKS = {
    "skipped_step": {"skip": ("|", "#5c6675")},
    "verdict": {
        "bad": ("^", level("bad")),
        "warning": ("D", level("warning")),
        "info": ("o", category("sky")),
    },
    "demote": {"demote": ("v", category("purple"))},
    "promote": {"promote": ("^", category("green"))},
}

# What the legend of the heatmap says besides its scale.
_OTHERS = {
    "bad": "overflow",
    "passed": "infinite, NaN or all zero through no fault of the layer",
    "zero": "all zero",
    "beyond": "beyond {}",
    "roomy": "in a wider format",
    "input": "input not finite",
}
_LONGEST = 40


def png(runs: list, overviews: dict) -> bytes:
    """Returns a PNG: for each run its loss scale above its headroom.

    Args:
        runs: List of `RunData`.
        overviews: Dict from their names to what `RunData.overview` returns.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    file = io.BytesIO()
    draw(runs, overviews).savefig(file, format="png", dpi=110)
    return file.getvalue()


def draw(runs: list, overviews: dict):
    """Returns the matplotlib figure; see `png`."""
    # Not pyplot: it would touch the figures of the user.
    from matplotlib.figure import Figure

    heights = [
        height
        for run in runs
        for height in (2.6, _height_of_rows(overviews[run.name]))
    ]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    ratios = {"height_ratios": heights}
    axes = figure.subplots(
        len(heights), 1, squeeze=False, sharex=False, gridspec_kw=ratios
    )[:, 0]
    for run, upper, lower in zip(runs, axes[::2], axes[1::2], strict=True):
        overview = overviews[run.name]
        upper.set_title(run.name, parse_math=False)
        _draw_scale(upper, overview)
        if overview["heat"] and _is_known(overview["heat"]):
            _draw_headroom(figure, lower, run, overview)
        else:
            lower.set_axis_off()
        for axis in upper, lower:
            axis.set_xlim(0, max(overview["last_step"], 1))
    return figure


def _height_of_rows(overview):
    # In inches: none of the labels is to touch the next.
    rows = len((overview["heat"] or {"layers": []})["layers"])
    return max(2.9, 0.7 + 0.11 * min(rows, _MOST_LAYERS))


def _is_known(heat):
    return any(metric["name"] == _METRIC for metric in heat["metrics"])


def _draw_scale(axis, overview):
    from matplotlib.ticker import MaxNLocator

    end = overview["last_step"]
    for course in overview["scale"]:
        steps = [*course["steps"], end]
        scales = np.log2([*course["scale"], course["scale"][-1]])
        name = printable(course["optimizer"].lstrip("_"))
        axis.step(steps, scales, where="post", label=name)
    bottom, top = axis.get_ylim()
    marks = [
        (kind, level_name, *mark)
        for kind, by_level in _MARKS.items()
        for level_name, mark in by_level.items()
    ]
    for kind, level_name, marker, colour in marks:
        at = [
            event.get("at_step", event["step"])
            for event in overview["events"]
            if (event["kind"], event["level"]) == (kind, level_name)
        ]
        if at:
            axis.plot(
                at,
                np.full(len(at), top),
                marker,
                color=colour,
                label=_mark_name(kind, level_name),
                clip_on=False,
            )
    _draw_blocks(axis, overview["events"], top)
    begins = [e for e in overview["events"] if e["kind"] == "train_begin"]
    for event in begins[1:]:
        axis.axvline(event["step"], color="#999999", linestyle=":")
    # At least one power of two to each side of a scale that is constant.
    around = max(1 - (top - bottom) / 2, 0)
    axis.set_ylim(bottom - around, top + around)
    axis.set_ylabel("loss scale")
    axis.set_xlabel("step")
    axis.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axis.yaxis.set_major_formatter(lambda bits, _: f"$2^{{{bits:.0f}}}$")
    if axis.get_legend_handles_labels()[1]:
        legend = axis.legend(loc="lower right", fontsize="small")
        for text in legend.get_texts():
            text.set_parse_math(False)


def _mark_name(kind, level_name):
    """In words; a verdict that is no serious one says so."""
    name = kind.replace("_", " ")
    notable = kind == "verdict" and level_name != "bad"
    return f"{name} ({level_name})" if notable else name


def _draw_blocks(axis, events, top):
    """Skipped steps of which there are too many to list, with their number."""
    _, colour = _MARKS["skipped_step"]["skip"]
    for event in events:
        if event["kind"] == "skipped_steps_not_kept" and "first_step" in event:
            ends = event["first_step"], event["last_step"]
            axis.plot(ends, (top, top), color=colour, lw=6, clip_on=False)
            axis.annotate(
                f"{event['count']:,} skipped",
                (sum(ends) / 2, top),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize="small",
                annotation_clip=False,
            )


def _draw_headroom(figure, axis, run, overview):
    grid = run.grid(_METRIC, _COLUMNS)
    layers = grid.layers
    shown = slice(None, None, -(-len(layers) // _MOST_LAYERS))
    name = overview["format"]["name"]
    wider = _wider(grid, overview["layers"], name)
    colours = headroom_colours(grid.worst, wider)
    colours[grid.lost & np.isnan(grid.worst)] = (*level("input"), 1)
    found = passed_cells(grid, _METRIC, overview["layers"], overview["events"])
    passed = found.cells >= 0
    colours[passed] = (*level("passed"), 1)
    axis.pcolormesh(
        np.append(grid.first, grid.last[-1] + 1),
        np.arange(len(layers) + 1),
        colours,
    )
    axis.invert_yaxis()
    labels = [*map(printable, _labels(layers)[shown])]
    axis.set_yticks(
        np.arange(len(layers))[shown] + 0.5, labels, parse_math=False
    )
    axis.tick_params(axis="y", labelsize=6)
    axis.set_xlabel("step")
    seen = {
        "input": grid.lost.any(),
        "passed": passed.any(),
        "roomy": (wider & (grid.worst > 0)).any(),
    }
    absent = {kind for kind, is_seen in seen.items() if not is_seen}
    _draw_legend(figure, axis, name, absent)


def _draw_legend(figure, axis, name, absent):
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    full = COLOURS["headroom"]["full"]
    bits = np.linspace(0, full, 256) + 1e-6
    colours = ListedColormap(headroom_colours(bits, np.zeros(256, bool)))
    scale = ScalarMappable(Normalize(0, full), colours)
    bar = figure.colorbar(scale, ax=axis, extend="max", extendfrac=0.02)
    bar.set_label("headroom in bits")
    others = [
        Patch(color=level(kind), label=text.format(name))
        for kind, text in _OTHERS.items()
        if kind not in absent
    ]
    axis.legend(
        handles=others,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(others),
        fontsize="small",
        frameon=False,
        borderaxespad=0,
    )


def _wider(grid, layers, name):
    """Where a layer was computed in a dtype of more range."""
    wider = np.zeros(grid.worst.shape, bool)
    dtypes = {layer["path"]: layer["dtypes"] for layer in layers}
    for row, call in enumerate(grid.layers):
        for since, dtype in dtypes.get(layer_of(call, dtypes), []):
            wider[row, grid.last > since] = is_wider(dtype, name)
    # As on the page: what a run in float32 would do in float16.
    return wider & (grid.worst <= 0) if wider.all() else wider


def _labels(paths):
    """Paths without the folders they share; of folders, how they end."""
    long = [path.split("/") for path in paths if len(path) > _LONGEST]
    shared = len(os.path.commonprefix([parts[:-1] for parts in long]))
    return [
        _label(path.split("/"), shared) if len(path) > _LONGEST else path
        for path in paths
    ]


def _label(parts, shared):
    *folders, name = parts[shared:]
    short = [re.sub(r"^.+_(\D+_\d+)$", r"…\1", part) for part in folders]
    start = ["…"] if shared else []
    return "/".join([*start, *short, name]).replace("…/…", "…")
