"""Runs side by side, as text: what the table of runs of the page has."""

from keras_mixprec.formats import format_digits, format_power, format_share

_HEADS = (
    "state",
    "steps",
    "skipped",
    "loss scale",
    "last loss",
    "float32",
    "16 bits",
    "samples/s",
    "run",
)
_TITLE = (
    "Runs, the gravest first; layers in float32, share of FLOPs in 16 bits:"
)


def runs_table(summaries: list[dict]) -> str:
    r"""Returns a line for each run.

    Names are last, so that they stay whole however long they are.

    Args:
        summaries: List of dicts, as `run_summary.summary` returns them.

    Example:
    >>> from keras_mixprec.reporting.runs_table import runs_table
    >>> run = {
    ...     "run": "a", "headline": {"state": "healthy"}, "last_step": 1200,
    ...     "skipped": 3, "scales": [2.0**15], "last_loss": 0.5,
    ...     "in_float32": 2, "share_of_flops": {"before": 1.0, "now": 0.994},
    ...     "samples_per_second": None,
    ... }
    >>> print("\n".join(runs_table([run]).splitlines()[1:]))
    state    steps  skipped  loss scale  last loss  float32  16 bits  samples/s  run
    healthy  1,200        3       2**15        0.5        2    99.4%          -  a
    """  # noqa: E501
    lines = [_HEADS, *map(_cells, summaries)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join([_TITLE, *(_line(line, widths) for line in lines)])


def _line(cells, widths):
    state, *figures, run = cells
    right = map(str.rjust, figures, widths[1:-1])
    return "  ".join([state.ljust(widths[0]), *right, run])


def _cells(row):
    loss, speed = row["last_loss"], row["samples_per_second"]
    share = row["share_of_flops"]["now"]
    return (
        row["headline"]["state"].replace("_", " "),
        f"{row['last_step']:,}",
        f"{row['skipped']:,}",
        ", ".join(map(format_power, row["scales"])) or "-",
        "-" if loss is None else format_digits(loss),
        str(row["in_float32"]),
        "-" if share is None else format_share(share),
        "-" if speed is None else format_digits(speed),
        row["run"],
    )
