"""A run as a picture, for where no page is shown."""

import io

import numpy as np

_METRIC = "activation_headroom_bits"
_COLUMNS = 400
_MOST_LAYERS = 60

# Bits of headroom that the colours cover: next to none, and float16's whole
# range of normal numbers above 1.
_RANGE = 0.01, 16

# Marks of events on the loss scale: colours of Okabe and Ito, which colour
# blind people tell apart.
_MARKS = {
    "skipped_step": ("|", "#999999"),
    "verdict": ("v", "#d55e00"),
    "demote": ("D", "#0072b2"),
    "promote": ("^", "#009e73"),
}


def png(runs: list, overviews: dict) -> bytes:
    """Returns a PNG: for each run its loss scale above its headroom.

    Args:
        runs: List of `RunData`.
        overviews: Dict from their names to what `RunData.overview` returns.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    # Not pyplot: it would touch the figures of the user.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5 * len(runs)), layout="constrained")
    axes = figure.subplots(2 * len(runs), 1, squeeze=False, sharex=False)[:, 0]
    for run, upper, lower in zip(runs, axes[::2], axes[1::2], strict=True):
        overview = overviews[run.name]
        upper.set_title(run.name, parse_math=False)
        _draw_scale(upper, overview)
        if overview["heat"] and _is_known(overview["heat"]):
            _draw_headroom(figure, lower, run)
        else:
            lower.set_axis_off()
        for axis in upper, lower:
            axis.set_xlim(0, max(overview["last_step"], 1))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _is_known(heat):
    return any(metric["name"] == _METRIC for metric in heat["metrics"])


def _draw_scale(axis, overview):
    end = overview["last_step"]
    for course in overview["scale"]:
        steps = [*course["steps"], end]
        scales = np.log2([*course["scale"], course["scale"][-1]])
        axis.step(
            steps, scales, where="post", label=course["optimizer"].lstrip("_")
        )
    bottom, top = axis.get_ylim()
    for kind, (marker, colour) in _MARKS.items():
        at = [
            event.get("at_step", event["step"])
            for event in overview["events"]
            if event["kind"] == kind and not event.get("dry_run")
        ]
        if at:
            axis.plot(
                at,
                np.full(len(at), top),
                marker,
                color=colour,
                label=kind.replace("_", " "),
                clip_on=False,
            )
    _draw_blocks(axis, overview["events"], top)
    for event in overview["events"]:
        if event["kind"] == "train_begin" and event["fit"] > 1:
            axis.axvline(event["step"], color="#999999", linestyle=":")
    axis.set_ylim(bottom, top)
    axis.set_ylabel("log2 of the loss scale")
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="lower right", fontsize="small")


def _draw_blocks(axis, events, top):
    """Skipped steps of which there are too many to list, with their number."""
    colour = _MARKS["skipped_step"][1]
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


def _draw_headroom(figure, axis, run):
    from matplotlib import colormaps

    grid = run.grid(_METRIC, _COLUMNS)
    layers = grid.layers
    shown = slice(None, None, -(-len(layers) // _MOST_LAYERS))
    drawn = axis.pcolormesh(
        np.append(grid.first, grid.last[-1] + 1),
        np.arange(len(layers) + 1),
        grid.worst,
        cmap=colormaps["cividis"].with_extremes(under="#d55e00"),
        vmin=_RANGE[0],
        vmax=_RANGE[1],
    )
    axis.invert_yaxis()
    axis.set_yticks(
        np.arange(len(layers))[shown] + 0.5, layers[shown], parse_math=False
    )
    axis.tick_params(axis="y", labelsize=6)
    axis.set_xlabel("step")
    bar = figure.colorbar(drawn, ax=axis, extend="both")
    bar.set_label("least headroom in bits")
