"""What a number that is not finite is: an infinity of either sign, or NaN."""

from collections.abc import Iterable, Mapping

KINDS = ("inf", "-inf", "nan")

STEPS, BATCHES = ("step", "steps"), ("batch", "batches")


def count_kinds(counts: Iterable = (0, 0, 0)) -> dict:
    """Returns a dict from each of `KINDS` to its count, an int.

    Args:
        counts: Numbers in the order of `KINDS`. Defaults to zeros.
    """
    return {kind: int(n) for kind, n in zip(KINDS, counts, strict=True)}


def format_kinds(counts: Mapping, units: tuple) -> str:
    """Formats how often each kind was seen, `""` if none was.

    Args:
        counts: Dict from each of `KINDS`, or some of them, to an int.
        units: What was counted, one of it and several.

    Example:
    >>> from keras_mixprec.nonfinite_kinds import STEPS, format_kinds
    >>> format_kinds({"inf": 2, "-inf": 0, "nan": 1}, STEPS)
    'inf in 2 steps, nan in 1'
    """
    seen = [(kind, counts[kind]) for kind in KINDS if counts.get(kind, 0) > 0]
    first = [f"{kind} in {n:,} {units[n > 1]}" for kind, n in seen[:1]]
    return ", ".join(first + [f"{kind} in {n:,}" for kind, n in seen[1:]])
