"""The smallest set of layers that a step is right with."""

import itertools
from collections.abc import Callable, Sequence

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.layers import LayerEntry
from keras_mixprec.policies.multiply_adds import multiply_adds


def smallest_set(
    ranked: Sequence[str], fits: Callable[[frozenset], bool]
) -> frozenset | None:
    """Returns a set of paths that fits and does not without any one of them.

    Nor without any two in one composite.

    First the shortest head of `ranked` that fits is sought, by doubling: from
    this side the model stays nearly all 16-bit, as it shall be in the end, so
    that few trials mix dtypes within a block. Then as many at once as the rest
    fits without are taken out again, the last ranked first, and composites as
    a whole before their parts.

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
    """Takes out of `kept` what it fits without, of groups in their order.

    All at once, if it can be. Of those that cannot, the first that has to stay
    is found by halves; then as many are tried at once as were spared before
    it, and twice as many after each trial that fits. Where every group has to
    stay that is one trial for each.
    """
    first, count = 0, len(groups)
    while first < len(groups):
        end = min(first + count, len(groups))
        rest = kept.difference(*groups[first:end])
        if fits(rest):
            kept, first, count = rest, end, 2 * count
            continue
        # Without all from `low` to `end` it does not fit, whatever is spared.
        low = first
        while end - low > 1:
            middle = (low + end) // 2
            rest = kept.difference(*groups[low:middle])
            if fits(rest):
                kept, low = rest, middle
            else:
                end = middle
        if len(groups[low]) > 1:
            parts = _groups(groups[low], depth + 1)
            kept = _without(parts, depth + 1, kept, fits)
        first, count = low + 1, max(low - first, 1)
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


def rank(entries: list[LayerEntry], instabilities: dict) -> list[LayerEntry]:
    """Returns the entries, the one first that float32 is best spent on.

    That is the most unstable; then what lies in the most unstable
    composite; then, below the thresholds of the diagnosis, the cheapest.

    Args:
        entries: List of `LayerEntry`.
        instabilities: Dict of path to instability.
    """

    def key(entry):
        # Below the threshold errors are just roundings, no ground to choose.
        own, *outer = (
            max(instabilities.get(holder.path, 0.0), 1.0)
            for holder in entry.lineage()
        )
        return -own, -max(outer, default=1.0), multiply_adds(entry) or 0

    return sorted(entries, key=key)


def instability(call: LayerCall, scale: float) -> float:
    """Returns a layer's error as a multiple of the threshold for it.

    It runs again on the inputs it had, once in what it computes in now and
    once in float32, forward and backward; the larger of both counts.

    Args:
        call: `LayerCall` of a step in float32, at loss scale 1.
        scale: Float. The loss scale.
    """
    replay = LayerReplay(call)
    if nonfinite([to_array(x) for x in replay.inputs]):
        return 0.0
    forward = relative_error(replay.forward(), replay.forward("float32"))
    cotangents = _cotangents(call, scale)
    if not any(c.any() for c in cotangents):
        return forward / thresholds.FORWARD_ERROR
    backward = relative_error(
        replay.gradients(cotangents), replay.gradients(cotangents, "float32")
    )
    return max(
        forward / thresholds.FORWARD_ERROR, backward / thresholds.BACKWARD_ERROR
    )


def _cotangents(call, scale):
    pairs = zip(call.float_outputs, call.float_cotangents, strict=True)
    return [
        to_array(output) * 0.0 if found is None else to_array(found) * scale
        for output, found in pairs
    ]
