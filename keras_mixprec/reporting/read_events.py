"""Checks events and rows of tables as they are read.

Users may log events of their own, other versions of this package have others,
and a log may be damaged. Later readers can rely on the keys and types.
"""

from collections.abc import Iterator

from keras_mixprec.reporting.event_kinds import EVENTS
from keras_mixprec.reporting.schema import EXPONENTS

# The kind of the note about an event that cannot be read.
UNREADABLE = "unreadable"

_NUMBER = int | float

# The required keys of each kind of event.
NEEDED = {
    kind: {*event.needs.split()}
    for kind, event in EVENTS.items()
    if event.needs is not None
}
# A range of steps needs both ends.
_ENDS = {"first_step", "last_step"}
_TYPES = {
    name: kind
    for kind, names in (
        (int, "at_step first_step last_step in_a_row fit count"),
        (int | None, "failing_since"),
        (dict, "layers because numbers settings counts kinds"),
        (str, "message finding level reason optimizer verdict advice details"),
        (str, "summary"),
        (list, "variables loss paths steps batches"),
        (str | None, "layer direction"),
        (bool, "within lost"),
        (int | float, "held seconds"),
    )
    for name in names.split()
}


def read_events(event: dict) -> Iterator[dict]:
    """Yields an event without damaged keys, and a note if there were any.

    An event without a required key yields only the note, and one without a kind
    or a step yields nothing.

    Args:
        event: Dict from JSON.
    """
    kind, step = event.get("kind"), event.get("step")
    if not isinstance(kind, str) or not isinstance(step, int):
        return
    needed = NEEDED.get(kind)
    if needed is not None and event.keys() & _ENDS:
        needed = needed | _ENDS
    wrong = [key for key in event if not _is_readable(event, key, needed)]
    kept = {key: event[key] for key in event if key not in wrong}
    missing = sorted((needed or set()) - kept.keys())
    if not missing:
        yield kept
    if missing or wrong:
        keys = ", ".join(map(repr, sorted({*missing, *wrong})))
        left_out = "It is" if missing else "They are"
        yield {
            "kind": UNREADABLE,
            "step": step,
            "message": f"The log has an event {kind!r} whose {keys} cannot be "
            f"read. {left_out} left out.",
        }


def _is_readable(event, key, needed):
    value = event[key]
    if key == "wall_time":
        return isinstance(value, _NUMBER) and abs(value) < 2**63
    if needed is None:  # An unknown kind.
        return True
    kind = _TYPES.get(key)
    if kind and not isinstance(value, kind):
        return False
    # Larger integers are no steps, and `float` may fail for them.
    if kind and isinstance(value, int) and abs(value) >= 2**63:
        return False
    if key == "layers":
        return all(map(_is_change, value.values()))
    if key == "counts":
        return all(isinstance(count, int) for count in value.values())
    if key == "numbers":
        return all(_is_number(*item) for item in value.items())
    return True


def _is_number(name, value):
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    if name.startswith(("rows_of_", "samples_of_")):
        return isinstance(value, list)
    return not name.startswith("bad_samples_of_") or isinstance(value, int)


_OF_LAYER = {"path": str, "compute_dtype": str}
_AMOUNTS = ("share_of_flops", "parameters")


def is_layer(row) -> bool:
    """Whether a row of the table of layers is valid.

    Args:
        row: Any value from JSON.
    """
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(n), kind) for n, kind in _OF_LAYER.items())
        and all(_is_amount(row.get(name)) for name in _AMOUNTS)
    )


def is_histogram(row: dict) -> bool:
    """Whether a row of the table of histograms is valid.

    Args:
        row: Dict.
    """
    exponents, counts = row.get("exponents"), row.get("counts")
    return (
        row.get("part") in (*EXPONENTS,)
        and isinstance(row.get("layer"), str)
        and isinstance(row.get("step"), int)
        and isinstance(exponents, list)
        and isinstance(counts, list)
        and len(exponents) == len(counts) > 0
        and all(isinstance(x, int) and -200 < x < 200 for x in exponents)
        and all(isinstance(x, int) and 0 <= x < 2**63 for x in counts)
    )


def _is_amount(value):
    known = isinstance(value, int | float)
    return value is None or known and 0 <= value < 2**63


def _is_change(change):
    return isinstance(change, dict) and isinstance(change.get("after"), str)
