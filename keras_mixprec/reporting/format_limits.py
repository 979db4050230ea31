"""The limits of number formats as powers of two."""

import math

from keras_mixprec.formats import get_format

# Bits of headroom reserved for later batches, whose numbers may be larger.
# `diagnose` reserves the same number of bits.
SPARE_BITS = 2

# The formats for which `what_if` predicts which layers fail, the narrowest
# last.
CHOICES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e5m2",
    "float8_e4m3fn",
)


def format_limits(dtype: str) -> dict:
    """Returns the limits of a format as powers of two.

    Args:
        dtype: String.

    Returns:
        Dict with `"name"`, `"maximum_bits"` (the logarithm of the largest
        number), and `"maximum_exponent"`, `"normal_exponent"` and
        `"subnormal_exponent"`, where overflow, normal and subnormal numbers
        start.
    """
    limits = get_format(dtype)
    return {
        "name": limits.name,
        "maximum_bits": math.log2(limits.maximum),
        "maximum_exponent": math.frexp(limits.maximum)[1],
        "normal_exponent": int(math.log2(limits.smallest_normal)),
        "subnormal_exponent": int(math.log2(limits.smallest_subnormal)),
    }


# The dtypes with more range than each format, as in `precision.js`.
_WIDER = {
    "float16": ("bfloat16", "float32", "float64"),
    "bfloat16": ("float64",),
}


def is_wider(dtype: str, limit: str) -> bool:
    """Returns whether a dtype has more range than the dtype of the headroom.

    Args:
        dtype: String.
        limit: String from `measured_against`.
    """
    return dtype in _WIDER[limit]


def measured_against(layers: list) -> str:
    """Returns the dtype that the headroom of a run refers to.

    Args:
        layers: List of dicts, the table of layers.
    """
    dtypes = {layer["compute_dtype"] for layer in layers}
    only_wide = "bfloat16" in dtypes and "float16" not in dtypes
    return "bfloat16" if only_wide else "float16"
