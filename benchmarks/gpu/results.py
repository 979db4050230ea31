"""The file of results: a JSON record a line, written as it goes.

Three kinds of record, all with the run, the backend and the part:

- a process starts: `on` (device and versions) and `items`, all that the part
  has;
- an item begins: `item` and `process`;
- it ends: `item` and either `rows` and `seconds` or `error`.

Several processes append to one file. A line that a kill has cut off is left
out.
"""

import contextlib
import json
import pathlib
from typing import NamedTuple

# Stands for an item if a part ended before its first one.
START = "start"


class Found(NamedTuple):
    """The results of a part on a backend.

    Attributes:
        items: List of names of all its items.
        last: Dict from an item to its record with rows, or else its last one.
        on: List of what it ran on.
    """

    items: list
    last: dict
    on: list

    def left(self) -> list:
        """Returns the items that have no rows."""
        return [i for i in self.items if "rows" not in self.last.get(i, ())]


class Results:
    """The records in a file."""

    def __init__(self, path):
        self._path = pathlib.Path(path)

    def add(self, **record):
        """Appends a record, in one piece."""
        line = json.dumps(record) + "\n"
        with self._path.open("ab+") as file:
            if file.seek(0, 2):
                file.seek(-1, 2)
                if file.read() != b"\n":  # What a kill cut off.
                    line = "\n" + line
            file.write(line.encode())

    def records(self) -> list:
        """Returns all records."""
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [record for record in found if isinstance(record, dict)]

    def parts(self) -> dict:
        """Returns a `Found` for each `(backend, part)`."""
        found = {}
        for record in self.records():
            key = record["backend"], record["part"]
            part = found.setdefault(key, Found([], {}, []))
            if "items" in record:
                part.items[:] = record["items"]
                part.last.pop(START, None)
            if "on" in record and record["on"] not in part.on:
                part.on.append(record["on"])
            if "item" in record and "rows" not in part.last.get(
                record["item"], ()
            ):
                part.last[record["item"]] = record
        return found

    def open_item(self, run: str, process: int) -> dict | None:
        """Returns the record of the item that a process did not finish."""
        begun = None
        for record in self.records():
            if (record["run"], record.get("process")) == (run, process):
                ended = "rows" in record or "error" in record
                begun = None if ended else record
        return begun
