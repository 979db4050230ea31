"""The table of runs."""

from collections.abc import Iterable

from keras_mixprec.formats import (
    format_digits,
    format_power,
    format_share,
    text_table,
)
from keras_mixprec.reporting.cards import (
    finding_in_words,
    policy_of,
    shares_in_16_bits,
)
from keras_mixprec.reporting.facts import LEVELS, dtype_now
from keras_mixprec.reporting.headline import STATES
from keras_mixprec.reporting.performance import is_of_training, speed_values

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
    "Runs, most severe first; layers in float32, share of FLOPs in 16 bits:"
)


def row_of(run) -> dict:
    """Returns the row of a `Run` in the table of runs.

    Returns:
        Dict. `"gravity"` is a rank, 0 for the most severe. `"last_loss"` is
        `None` if no loss was logged. `"samples_per_second"` is `None` if too
        few steps were timed or most steps were skipped.
    """
    said, cause = run.headline, finding_in_words(run)["text"]
    if layer := run.main.get("layer"):
        cause += f" in {layer}"
    speed = speed_values(run.speed) if run.speed else {}
    skipped = run.skipped / max(run.last_step, 1)
    is_known = speed and is_of_training(speed, skipped)
    return {
        "run": run.name,
        "policy": policy_of(run.table),
        "last_step": run.last_step,
        "skipped": run.skipped,
        "headline": said,
        "share_of_flops": shares_in_16_bits(run.table),
        "scales": [c["scale"][-1] for c in run.scale if c["scale"]],
        "last_loss": run.loss["values"][-1] if run.loss else None,
        "cause": cause,
        "gravity": gravity(said["state"], run.finding),
        "samples_per_second": speed["samples_per_second"] if is_known else None,
        "in_float32": sum(dtype_now(x) == "float32" for x in run.layers),
        "demoted": sum(x["demoted_at"] is not None for x in run.layers),
    }


def gravity(state: str, finding: dict | None) -> int:
    """Returns the rank of a run by state, then by main finding; 0 is worst.

    Args:
        state: String, one of `STATES`.
        finding: Dict from `main_finding`.
    """
    rank = len(LEVELS)
    if finding and not finding["repaired"]:
        rank = LEVELS.index(finding["level"])
    return STATES.index(state) * (len(LEVELS) + 1) + rank


def runs_table(rows: Iterable[dict]) -> str:
    r"""Returns the table of runs as text, with one line per run.

    Args:
        rows: Dicts from `row_of`.

    Example:
    >>> from keras_mixprec.reporting.runs import runs_table
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
    return "\n".join([_TITLE, *text_table([_HEADS, *map(_cells, rows)])])


def _cells(row):
    def known(value, write):
        return "-" if value is None else write(value)

    return (
        row["headline"]["state"].replace("_", " "),
        f"{row['last_step']:,}",
        f"{row['skipped']:,}",
        ", ".join(map(format_power, row["scales"])) or "-",
        known(row["last_loss"], format_digits),
        str(row["in_float32"]),
        known(row["share_of_flops"]["now"], format_share),
        known(row["samples_per_second"], format_digits),
        row["run"],
    )
