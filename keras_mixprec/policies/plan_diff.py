"""What changes from one plan to another."""

from typing import NamedTuple


class Change(NamedTuple):
    """One difference between two plans.

    Attributes:
        path: String. The layer's path; `"<model>"` for the model itself.
        before: The policy in the first plan, `None` if it has no such layer.
        after: The policy in the second plan, `None` likewise.
    """

    path: str
    before: str | None
    after: str | None

    def __str__(self):
        before, after = self.before or "absent", self.after or "absent"
        return f"{self.path}: {before} -> {after}"


def changes(before: dict, after: dict) -> list[Change]:
    """Returns one `Change` for each path whose policy differs."""
    return [
        Change(path, before.get(path), after.get(path))
        for path in before | after
        if before.get(path) != after.get(path)
    ]
