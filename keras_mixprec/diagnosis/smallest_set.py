"""The search for the smallest set of layers, by paths alone."""

import itertools
from collections.abc import Callable, Sequence


def smallest_set(
    ranked: Sequence[str], fits: Callable[[frozenset], bool]
) -> frozenset | None:
    """Returns a set of paths that fits and does not without any one of them.

    Nor without any two in one composite.

    First the shortest head of `ranked` that fits is sought, by doubling: from
    this side the model stays nearly all 16-bit, as it shall be in the end, so
    that few trials mix dtypes within a block. Then halves of it are taken out
    again as long as the rest fits, the last ranked first, and composites as a
    whole before their parts.

    Args:
        ranked: Paths, the one most needed in the set first.
        fits: Function of a set of paths. If a set fits, so do most that
            contain it.

    Returns:
        The set; `None` if not even all paths fit.
    """
    kept = _shortest_head(ranked, fits)
    if kept is None:
        return None
    least_first = [path for path in reversed(ranked) if path in kept]
    kept = _without(_groups(least_first, 0), 0, kept, fits)
    # One that had to stay while another was there may be spared by now; and
    # two whose results a composite combines, only together.
    for spared in [{path} for path in least_first] + _relatives(least_first):
        if spared <= kept and fits(kept - spared):
            kept -= spared
    return kept


def _shortest_head(ranked, fits):
    size = 0
    while not fits(frozenset(ranked[:size])):
        if size >= len(ranked):
            return None
        size = 2 * size or 1
    return frozenset(ranked[:size])


def _without(groups, depth, kept, fits):
    """Takes out of `kept` what it fits without, halving what it does not."""
    rest = kept.difference(*groups)
    if fits(rest):
        return rest
    if len(groups) > 1:
        middle = len(groups) // 2
        kept = _without(groups[:middle], depth, kept, fits)
        return _without(groups[middle:], depth, kept, fits)
    if len(groups[0]) > 1:
        parts = _groups(groups[0], depth + 1)
        return _without(parts, depth + 1, kept, fits)
    return kept


def _groups(paths, depth):
    """Paths that lie in one composite, at this depth of nesting, together."""
    groups = {}
    for path in paths:
        groups.setdefault(tuple(path.split("/")[: depth + 1]), []).append(path)
    return list(groups.values())


def _relatives(paths):
    """Each two paths of which one is in the other, or both in a third."""

    def parent(path):
        return path.rpartition("/")[0]

    return [
        {a, b}
        for a, b in itertools.combinations(paths, 2)
        if parent(a) == b or parent(b) == a or parent(a) == parent(b) != ""
    ]
