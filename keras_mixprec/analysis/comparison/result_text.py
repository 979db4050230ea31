"""A comparison as text: a table of one screen, and what follows from it."""

from collections.abc import Iterator

from keras_mixprec.analysis.comparison.best import reason
from keras_mixprec.analysis.comparison.record import Comparison
from keras_mixprec.analysis.comparison.rows import (
    has_speed,
    is_slower,
    shown_bytes,
    shown_metric,
    shown_speed,
    shown_tolerance,
)
from keras_mixprec.formats import (
    SCREEN_WIDTH,
    fill_screen,
    format_count,
    format_digits,
    format_share,
)

# What the table has no column for: key of a row, head, unit.
_LISTED = (
    ("samples_per_second", "Samples per second", ""),
    ("tokens_per_second", "Tokens per second", ""),
    ("compile_seconds", "Compiled, or first used, in", " s"),
    ("energy_joules_per_sample", "Energy of a sample", " J"),
)

MEASURED_BY = {
    "device": "the backend's own count of its device's memory",
    "compiled_program": "what the compiled program needs, by the compiler",
    "process": "resident memory of a process of its own",
}


def text(record: Comparison, rows: list[dict]) -> str:
    """Returns it.

    Args:
        record: The record of a comparison.
        rows: What `rows.rows` made of it.
    """
    table = [heads(record), *map(cells, rows)]
    lines = [fill_screen(title(record)), "", *_aligned(table), ""]
    lines += map(fill_screen, remarks(record, rows))
    return "\n".join([*lines, fill_screen(f"Best: {reason(record, rows)}")])


def title(record: Comparison) -> str:
    """Returns what was compared on what, in one line."""
    name = record["backend"]
    versions = record["versions"]
    backend = " ".join(filter(None, (name, versions.get(name))))
    steps = format_count(record["steps"], "step")
    samples = format_count(record["batch_size"], "sample")
    seeds = ", ".join(map(str, record["seeds"]))
    which = "seeds" if len(record["seeds"]) > 1 else "seed"
    return (
        f"{backend} on {record['device']}: {steps} of {samples}, "
        f"{which} {seeds}"
    )


def heads(record: Comparison) -> list[str]:
    """Returns the heads of the table's columns."""
    heads = "", "step", "speed", "memory", "16 bits", record["metric"]
    return [*heads, "verdict"]


def cells(row: dict) -> list[str]:
    """Returns a row's cells."""
    seconds, share = row["step_seconds"], row["share_of_flops_16bit"]
    return [
        row["name"],
        "-" if seconds is None else _shown_seconds(seconds),
        shown_speed(row),
        shown_bytes(row["memory_bytes"]),
        "-" if share is None else format_share(share),
        shown_metric(row),
        row["verdict"],
    ]


def remarks(record: Comparison, rows: list[dict]) -> Iterator[str]:
    """Yields what the table has no room for, a sentence or two each."""
    base = rows[0]["name"]
    blocks = format_count(_blocks(record), "timed block")
    yield (
        f"Speed is {base}'s step time divided by each one's, in each of "
        f"{blocks} that took turns: median and interval ({_confidence(rows)}). "
        f"{record['metric']} is the mean ± standard deviation over seeds; "
        f"{shown_tolerance(record)} of {base}'s is tolerated."
    )
    slower = [row["name"] for row in rows if is_slower(row)]
    if slower:
        yield f"Slower than {base}: {', '.join(slower)}."
    if any(row["speed"] and not has_speed(row) for row in rows[1:]):
        yield (
            "Which is faster takes six pairs of timed blocks to say: give more "
            "`seeds`, or `steps` in more `blocks`."
        )
    for row in rows:
        yield from _about(row)
    for key, head, unit in _LISTED:
        known = [r for r in rows if r[key]]
        parts = [f"{r['name']} {format_digits(r[key])}{unit}" for r in known]
        if parts:
            yield f"{head}: {', '.join(parts)}."
    yield from _memory(record)


def _about(row):
    if row["why"]:
        yield f"{row['name']}: {row['verdict']}: {row['why'].rstrip('.')}."
    if row["skipped_steps"]:
        steps = format_count(row["skipped_steps"], "step")
        yield (
            f"{row['name']}: {steps} skipped, {row['seconds_lost']:.2g} s lost "
            "to them."
        )
    for note in row["notes"]:
        yield f"{row['name']}: {note.rstrip('.')}."


def _memory(record):
    known = [arm for arm in record["arms"] if arm["memory"]]
    for way in dict.fromkeys(arm["memory"]["measured_by"] for arm in known):
        yield f"Memory is {MEASURED_BY.get(way, way)}."
    for arm in known:
        parts = [
            f"{part} {shown_bytes(arm['memory'][f'{part}_bytes'])}"
            for part in ("weights", "slots", "activations")
            if arm["memory"][f"{part}_bytes"] is not None
        ]
        if parts:
            yield f"Memory of {arm['name']}: {', '.join(parts)}."


def _confidence(rows):
    known = [row["speed"]["confidence"] for row in rows[1:] if row["speed"]]
    return f"{min(known, default=1.0):.0%}"


def _blocks(record):
    return len(record["arms"][0]["step_seconds"])


def _aligned(table):
    """Lines of at most 100 columns: a long name is on a line of its own."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rest = sum(widths[1:]) + 2 * len(widths[1:])
    widths[0] = min(widths[0], max(SCREEN_WIDTH - rest, 12))
    for name, *middle, last in table:
        if len(name) > widths[0]:
            yield name
            name = ""
        parts = [name.ljust(widths[0])]
        parts += map(str.rjust, middle, widths[1:-1])
        yield "  ".join([*parts, last]).rstrip()


def _shown_seconds(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
