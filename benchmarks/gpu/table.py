"""The results in Markdown: a table for each part.

`python -m benchmarks.gpu.table DIR` writes it from what is there.
"""

import pathlib
import sys

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import START, Results
from benchmarks.timing import markdown

# The column that says how a case differs from its result on a CPU. A table with
# this column shows only the cases that differ.
DIFFERS = "differs"

# A row that is a line below the table instead.
NOTE = "note"


def write_table(folder) -> str:
    """Writes `gpu.md` from `gpu.jsonl`, and returns it."""
    found = Results(folder / "gpu.jsonl").parts()
    sections = [
        _section(name, {b: f for (b, part), f in found.items() if part == name})
        for name in PARTS
        if any(part == name for _, part in found)
    ]
    text = "\n\n".join(["# Measured on a device", *sections]) + "\n"
    (folder / "gpu.md").write_text(text)
    return text


def _section(name, backends):
    rows = [
        {"backend": backend, "item": item, **row}
        for backend, found in backends.items()
        for item, record in found.last.items()
        for row in record.get("rows", ())
    ]
    notes = [_note(row) for row in rows if NOTE in row]
    shown = [r for r in rows if NOTE not in r and r.get(DIFFERS, True)]
    header = list(dict.fromkeys(column for row in shown for column in row))
    parts = [f"## {name}", PARTS[name].title]
    if shown:
        cells = [[_cell(row.get(c, "-")) for c in header] for row in shown]
        parts.append(markdown(header, cells))
    lines = [line for b, found in backends.items() for line in _lines(b, found)]
    return "\n\n".join([*parts, "\n".join(notes + lines)])


def _note(row):
    return f"- {row['backend']}, {row['item']}: {row[NOTE]}"


def _lines(backend, found):
    """Returns the lines below a table: the device, and what failed."""
    done = [r["rows"] for r in found.last.values() if "rows" in r]
    line = f"- {backend}: {len(done)} of {len(found.items)} done"
    compared = [r[DIFFERS] for rows in done for r in rows if DIFFERS in r]
    if compared:
        line += f", {sum(map(bool, compared))} not as on a CPU"
    if found.items:
        yield f"{line}; on {' and on '.join(found.on)}"
    for item, record in found.last.items():
        if "rows" not in record:
            name = backend if item == START else f"{backend}, {item}"
            yield f"- {name}: {record.get('error', 'was cut off')}"


def _cell(value):
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(write_table(pathlib.Path(sys.argv[1])))
