"""What a search finds."""

from typing import NamedTuple


class Culprit(NamedTuple):
    """A layer at fault.

    Attributes:
        path: String. Its path.
        layers: List of the layers to demote: it alone, or all inside it too.
        kind: String. As in `Verdict`.
        direction: String. `"forward"` or `"backward"`.
        numbers: Dict. The evidence.
    """

    path: str
    layers: list
    kind: str
    direction: str
    numbers: dict
