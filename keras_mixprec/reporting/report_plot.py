"""The loss scale of runs with their events, drawn by matplotlib."""

from collections.abc import Iterable

import numpy as np

from keras_mixprec.formats import printable
from keras_mixprec.reporting.report_page import COLOURS

# Shapes and colours of the page.
_MARKS = {
    "skip": ("|", "grey"),
    "bad": ("^", "vermillion"),
    "warning": ("D", "orange"),
    "info": ("o", "sky"),
    "demote": ("v", "purple"),
    "promote": ("^", "green"),
}


def plot(overviews: Iterable[dict], ax=None):
    """Draws the loss scale of each run by step, and where events were.

    Args:
        overviews: Dicts, as `RunData.overview` returns them.
        ax: Matplotlib's `Axes`. Defaults to `None`, those of a new figure.

    Returns:
        The `Axes`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    # Not pyplot: it would touch the figures of the user.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        ax = Figure(figsize=(10, 3.5), layout="constrained").subplots()
    for overview in overviews:
        for course in overview["scale"]:
            steps = [*course["steps"], overview["last_step"]]
            scales = np.log2([*course["scale"], course["scale"][-1]])
            name = f"{overview['run']} {course['optimizer']}".rstrip()
            ax.step(steps, scales, where="post", label=printable(name))
        _draw_events(ax, overview)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_formatter(lambda bits, _: f"$2^{{{bits:.0f}}}$")
    if ax.get_legend_handles_labels()[1]:
        legend = ax.legend(fontsize="small")
        for text in legend.get_texts():
            text.set_parse_math(False)
    return ax


def _draw_events(ax, overview):
    """Marks events on the curve of the first loss scale."""
    found: dict = {}
    for row in overview["told"]:
        if row["lane"]:
            found.setdefault(row["level"], []).extend(row["steps"])
    courses = overview["scale"] or [{"steps": [0], "scale": [1.0]}]
    starts, scales = courses[0]["steps"], np.log2(courses[0]["scale"])
    for level, steps in found.items():
        at = np.searchsorted(starts, steps, "right") - 1
        shape, name = _MARKS[level]
        colour = np.array(COLOURS["category"].get(name, [92, 102, 117])) / 255
        ax.plot(steps, scales[np.maximum(at, 0)], shape, color=colour)
