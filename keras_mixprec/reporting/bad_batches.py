"""Names batches with non-finite inputs."""

import itertools

from keras_mixprec.formats import BATCHES

# The maximum number of ranges of batches that a sentence lists.
LISTED = 8


def bad_batches(batches: list, count: int, all_known: bool) -> str:
    """Returns a sentence about bad batches, or an empty string.

    Args:
        batches: List as in `format_places`, whose dicts also have `"step"` and
            `"rows"`, the first bad row of each part of the batch.
        count: Int, as in `format_places`.
        all_known: Boolean. False if there may be more than `count`.
    """
    if not count:
        return ""
    least = "" if all_known else "at least "
    first = batches[0]
    rows = " and ".join(f"row {r} of {x}" for x, r in first["rows"].items())
    return (
        f"Non-finite inputs in {least}{count:,} {BATCHES[count > 1]}: "
        f"{format_places(batches, count)}. The first is at step "
        f"{first['step']:,}, in {rows} of that batch. Epochs, batches and "
        "rows count from 0, steps from 1."
    )


def format_places(batches: list, count: int) -> str:
    """Names batches by epoch, and consecutive batches as a range.

    Args:
        batches: List of dicts with `"epoch"` and `"batch"`.
        count: Int. The number of batches, including those not in the list.

    Example:
    >>> from keras_mixprec.reporting.bad_batches import format_places
    >>> at = [{"epoch": 1, "batch": batch} for batch in (3, 17, 20, 21, 22)]
    >>> format_places(at, 17)
    'epoch 1, batches 3, 17, 20-22 and 12 more'
    """
    stretches = []
    for place in batches:
        epoch, batch = place["epoch"], place["batch"]
        if stretches and stretches[-1][::2] == [epoch, batch - 1]:
            stretches[-1][2] = batch
        else:
            stretches.append([epoch, batch, batch])
    listed = []
    for epoch, own in itertools.groupby(stretches[:LISTED], lambda s: s[0]):
        spans = [(first, last) for _, first, last in own]
        count -= sum(last - first + 1 for first, last in spans)
        several = len(spans) > 1 or spans[0][0] < spans[0][1]
        names = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans)
        listed.append(f"epoch {epoch}, {BATCHES[several]} {names}")
    return "; ".join(listed) + (f" and {count:,} more" if count else "")
