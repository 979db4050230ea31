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
    predict: Callable[[], int | None] = lambda: None,
) -> tuple[int, int | None]:
    """Returns the largest size that fits, and the smallest known not to.

    Doubles until one does not, then halves the interval between them. If the
    answer is predicted, it is tried next, and if it is right its neighbour
    last; else the distance to the next one doubles.

    Args:
        fits: Function of a size. Of two sizes the larger does not fit if the
            smaller does not.
        low: Int. The first size.
        high: Int. The largest to try.
        step: Int. Sizes tried are `low` and multiples of it, and the two
            returned are that far apart. Defaults to `None`, `step_at` of the
            size.
        predict: Function that returns what size might be the answer, asked
            after the first that fits; `None` if it cannot say.

    Returns:
        Pair of the largest, 0 if not even `low` fits, and the smallest that
        does not, `None` if `high` fits.
    """

    def unit_at(size):
        return step or step_at(size)

    if not fits(low):
        return 0, low
    fit, fail, stride = low, None, low
    guess = predict() if low < high else None
    while fit < high and (fail is None or fail - fit > unit_at(fit)):
        unit = unit_at(fit)
        if guess is not None:
            unit = stride = unit_at(guess)
            size, guess = guess, None
        elif fail is None:
            size, stride = fit + stride, 2 * stride
        else:
            size, stride = max(fail - stride, (fit + fail) // 2), 2 * stride
        # A multiple of the unit that is not known yet.
        size = min(max(size // unit, fit // unit + 1) * unit, high)
        if fits(size):
            fit = size
        else:
            fail = size
    return fit, fail
