"""The smallest set of layers that a step is right with."""

from collections.abc import Callable, Sequence

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.layer_replay import LayerReplay


def smallest_set(
    ranked: Sequence[str], fits: Callable[[frozenset], bool]
) -> frozenset | None:
    """Returns a set of paths that fits and does not without any one of them.

    The search doubles the head of `ranked` until it fits. So the model stays
    nearly all 16-bit, and few trials mix dtypes within a block. Then it takes
    paths out again by halves, the last ranked first.

    Args:
        ranked: Paths, the one most needed in the set first.
        fits: Function of a set of paths. If a set fits, so do most that
            contain it.

    Returns:
        The set; `None` if not even all paths fit.
    """
    kept = _shortest_head(ranked, fits)
    if not kept:
        return kept
    least_first = [path for path in reversed(ranked) if path in kept]
    kept = _without(least_first, kept, fits)
    # A layer that had to stay at first may be left out now that others are
    # gone.
    for path in least_first:
        if path in kept and fits(kept - {path}):
            kept -= {path}
    return kept


def _shortest_head(ranked, fits):
    size = 0
    while not fits(frozenset(ranked[:size])):
        if size >= len(ranked):
            return None
        size = 2 * size or 1
    return frozenset(ranked[:size])


def _without(paths, kept, fits):
    """Takes the paths out of `kept` that can be spared, all or by halves."""
    rest = kept.difference(paths)
    if fits(rest):
        return rest
    if len(paths) == 1:
        return kept
    middle = len(paths) // 2
    kept = _without(paths[:middle], kept, fits)
    return _without(paths[middle:], kept, fits)


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
