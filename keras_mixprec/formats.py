"""Number formats, and how reports write numbers and text."""

import dataclasses
import decimal
import functools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes

SIXTEEN_BITS = ("float16", "bfloat16")

# Reports round halves up, as JavaScript's `toPrecision` does, so that they show
# the same digits as the page.
_TWO_DIGITS = decimal.Context(prec=2, rounding=decimal.ROUND_HALF_UP)

# The maximum number of characters per line of a text report.
SCREEN_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Format:
    """The range and the resolution of a floating-point format.

    Attributes:
        name: String. Keras' name of the dtype.
        maximum: Float. Largest finite number.
        smallest_normal: Float. Smaller numbers lose digits.
        smallest_subnormal: Float. Numbers below half of this become zero.
        epsilon: Float. Distance from 1 to the next larger number.
    """

    name: str
    maximum: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float


# Characters that `printable` escapes: control characters, characters that
# change the writing direction, and surrogates, which stand for invalid bytes in
# file names.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e"
    "\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Returns a text with its control characters escaped.

    Without this, a layer's name could control the terminal, or hide part of the
    text.

    Example:
    >>> from keras_mixprec.formats import printable
    >>> printable("dense\x1b[2J")
    'dense\\x1b[2J'
    """
    return _HIDDEN.sub(
        lambda found: found[0].encode("unicode_escape").decode(), text
    )


def format_count(number: int, noun: str) -> str:
    """Formats a number of things, in the singular or plural.

    Example:
    >>> from keras_mixprec.formats import format_count
    >>> format_count(1, "step"), format_count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_names(names: Iterable[str], shown: int, noun: str = "") -> str:
    """Formats the first names of a list, and how many more there are.

    Args:
        names: Iterable of strings.
        shown: Int. The number of names to show.
        noun: String, the singular noun for the other names. Defaults to none.

    Example:
    >>> from keras_mixprec.formats import format_names
    >>> format_names("abc", 3), format_names("abc", 2, "layer")
    ('a, b, c', 'a, b and 1 more layer')
    """
    names = list(names)
    count = len(names) - shown
    kind = f"more {noun}".strip()
    others = format_count(count, kind) if noun else f"{count:,} {kind}"
    return ", ".join(names[:shown]) + f" and {others}" * (count > 0)


def format_moment(step: int, at: str = "at") -> str:
    """Formats the step at which something was found.

    Args:
        step: Int. Steps count from 1; 0 is before the first step.
        at: String, the word before a step. Defaults to `"at"`.

    Example:
    >>> from keras_mixprec.formats import format_moment
    >>> format_moment(0), format_moment(1200), format_moment(3, "after")
    ('before the first step', 'at step 1,200', 'after step 3')
    """
    return f"{at} step {step:,}" if step else "before the first step"


def format_digits(number: float) -> str:
    """Formats a number with three significant digits.

    Numbers from 1,000 to 10 million keep all digits before the point.

    Example:
    >>> from keras_mixprec.formats import format_digits
    >>> format_digits(0.05391), format_digits(999.7), format_digits(13900)
    ('0.0539', '1000', '13,900')
    >>> format_digits(2.5129e34)
    '2.51e+34'
    """
    if 1000 <= number < 1e7:
        return f"{number:,.0f}"
    return f"{float(f'{number:.3g}'):g}"


def format_bits(bits: float) -> str:
    """Formats headroom. Minus infinity stands for non-finite numbers.

    Example:
    >>> from keras_mixprec.formats import format_bits
    >>> format_bits(5.96), format_bits(float("-inf"))
    ('6.0 bits', 'not finite')
    """
    return "not finite" if bits == -math.inf else f"{bits:.1f} bits"


def format_share(share: float) -> str:
    """Formats a share. Only 1.0 becomes "100%", and only 0.0 becomes "0%".

    The page formats shares in the same way, but with narrow spaces.

    Example:
    >>> from keras_mixprec.formats import format_share
    >>> [format_share(share) for share in (1.0, 0.99974, 0.836, 0.0267, 1e-6)]
    ['100%', '99.97%', '84%', '2.7%', '<0.01%']
    """
    if 0 < share < 1e-4:
        return "<0.01%"
    if share > 0.99:  # Round down, so that 99.996% does not become 100%.
        return f"{math.floor(share * 1e4) / 100:g}%"
    return f"{float(_TWO_DIGITS.create_decimal(100 * float(share))):g}%"


def format_bytes(count: float) -> str:
    """Formats a number of bytes.

    Example:
    >>> from keras_mixprec.formats import format_bytes
    >>> format_bytes(1.72e9), format_bytes(600 * 2**20), format_bytes(12)
    ('1.6 GiB', '600 MiB', '12 bytes')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**exponent:
            return f"{format_digits(count / 2**exponent)} {unit}"
    return format_count(round(count), "byte")


def format_power(number: float) -> str:
    """Formats a number, and writes a power of two as `2**n`.

    Example:
    >>> from keras_mixprec.formats import format_power
    >>> format_power(2.0**24), format_power(0.1)
    ('2**24', '0.1')
    """
    mantissa, exponent = math.frexp(number)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{number:g}"


@functools.cache
def get_format(dtype: str) -> Format:
    """Returns the `Format` of a floating-point dtype, given by its name."""
    info = ml_dtypes.finfo(dtype)
    return Format(
        dtype,
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
        float(info.eps),
    )


NONFINITE_KINDS = ("inf", "-inf", "nan")

STEPS, BATCHES = ("step", "steps"), ("batch", "batches")


def count_kinds(counts: Iterable = (0, 0, 0)) -> dict:
    """Returns a dict from each of `NONFINITE_KINDS` to its count, an int.

    Args:
        counts: Numbers in the order of `NONFINITE_KINDS`. Defaults to zeros.
    """
    return {
        kind: int(n) for kind, n in zip(NONFINITE_KINDS, counts, strict=True)
    }


def format_kinds(counts: Mapping, units: tuple) -> str:
    """Formats how many times each non-finite kind occurred, or returns `""`.

    Args:
        counts: Dict from some or all of `NONFINITE_KINDS` to ints.
        units: Pair of a noun's singular and plural.

    Example:
    >>> from keras_mixprec.formats import STEPS, format_kinds
    >>> format_kinds({"inf": 2, "-inf": 0, "nan": 1}, STEPS)
    'inf in 2 steps, nan in 1'
    """
    seen = [
        (kind, counts[kind])
        for kind in NONFINITE_KINDS
        if counts.get(kind, 0) > 0
    ]
    first = [f"{kind} in {n:,} {units[n > 1]}" for kind, n in seen[:1]]
    return ", ".join(first + [f"{kind} in {n:,}" for kind, n in seen[1:]])


def fill_screen(sentence: str) -> str:
    """Wraps a sentence between words, to lines that fit a screen.

    Args:
        sentence: String. Lines after the first are indented by four.
    """
    return textwrap.fill(
        sentence,
        SCREEN_WIDTH,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def text_table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, with its numbers aligned to the right.

    Args:
        rows: The strings of each row, the titles first. The first column is
            aligned to the left. So is the last column, unless all its cells
            begin with a digit. A first cell that is too long for the screen
            gets its own line.

    Example:
    >>> from keras_mixprec.formats import text_table
    >>> text_table([["", "step", "verdict"], ["float32", "9 ms", "best"]])
    ['         step  verdict', 'float32  9 ms  best']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rest = sum(widths[1:]) + 2 * len(widths[1:])
    widths[0] = min(widths[0], max(SCREEN_WIDTH - rest, 12))
    if not all(row[-1][:1].isdigit() for row in rows[1:]):
        widths[-1] = 0
    lines = []
    for first, *others in rows:
        if len(first) > widths[0]:
            lines.append(first)
            first = ""
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines
