"""Which sizes to try until the largest that fits is known."""

from collections.abc import Callable

# The answer is exact up to this many samples, and above to 3%: sizes tried
# are then multiples of powers of two.
_EXACT = 32


def step_at(size: int) -> int:
    """Returns the largest power of two that is at most 1/32 of a size.

    Example:
    >>> from keras_mixprec.analysis.largest_batch.search import step_at
    >>> [step_at(size) for size in (1, 63, 64, 1000)]
    [1, 1, 2, 16]
    """
    return 1 << max((size // _EXACT).bit_length() - 1, 0)


def search(
    fits: Callable[[int], bool],
    low: int,
    high: int,
    step: int | None = None,
) -> tuple[int, int | None]:
    """Returns the largest size that fits, and the smallest known not to.

    Doubles until one does not, then halves the interval between them.

    Args:
        fits: Function of a size. Of two sizes the larger does not fit if the
            smaller does not.
        low: Int. The first size.
        high: Int. The largest to try.
        step: Int. Sizes tried are `low` and multiples of it, and the two
            returned are that far apart. Defaults to `None`, `step_at` of the
            size.

    Returns:
        Pair of the largest, 0 if not even `low` fits, and the smallest that
        does not, `None` if `high` fits.
    """

    def unit_at(size):
        return step or step_at(size)

    if not fits(low):
        return 0, low
    fit, fail = low, None
    while fit < high and (fail is None or fail - fit > unit_at(fit)):
        unit = unit_at(fit)
        size = 2 * fit if fail is None else (fit + fail) // 2
        # A multiple of the unit that is not known yet.
        size = min(max(size // unit, fit // unit + 1) * unit, high)
        if fits(size):
            fit = size
        else:
            fail = size
    return fit, fail
