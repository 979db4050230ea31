"""The arithmetic of the page, in node, against NumPy and ml_dtypes."""

import json
import os
import pathlib
import subprocess

import ml_dtypes
import numpy as np
import pytest
from node_page import colours, installed

from keras_mixprec.formats import format_share
from keras_mixprec.metrics import METRICS
from keras_mixprec.reporting.format_limits import CHOICES, format_limits

TESTS = pathlib.Path(__file__).with_name("page_functions.test.mjs")
SHARES = [0, 1e-6, 1e-4, 0.0049, 0.0267, 0.5, 0.836, 0.985, 0.99974, 1]


def cast_state(largest, low, dtype):
    """What becomes of numbers between two powers of two in a format."""
    numbers = np.array([2.0**low, 2.0**largest], "float64")
    with np.errstate(over="ignore"):
        # Without infinities a format has NaN there.
        cast = numbers.astype(ml_dtypes.finfo(dtype).dtype)
        spare = (4 * numbers).astype(cast.dtype)
    if not np.isfinite(cast[1].astype("float64")):
        return "overflows"
    if cast[0] == 0:
        return "vanishes"
    finite = np.isfinite(spare[1].astype("float64"))
    return "fits" if finite else "close"


def some_casts():
    for dtype in CHOICES[1:]:
        info = ml_dtypes.finfo(dtype)
        top = int(np.log2(float(info.max)))
        bottom = int(np.log2(float(info.smallest_subnormal)))
        for largest in (0, top - 3, top - 0.5, top + 1):
            # A tie at half the smallest number is rounded to 0.
            for low in (bottom - 2, bottom - 1, bottom, bottom + 1):
                range_ = {"largest": largest, "low": low}
                state = cast_state(largest, low, dtype)
                yield {"dtype": dtype, "range": range_, "state": state}


def test_the_functions_of_the_page():
    installed()
    known = {
        "formats": [format_limits(name) for name in CHOICES],
        "casts": list(some_casts()),
        "units": sorted({metric.unit for metric in METRICS.values()}),
        "share": [SHARES, [*map(format_share, SHARES)]],
    }
    done = subprocess.run(
        ["node", "--test", TESTS],
        capture_output=True,
        text=True,
        env=os.environ | {"MIXPREC_KNOWN": json.dumps(known)},
    )
    assert done.returncode == 0, done.stdout


# Colours: WCAG's ratio of luminances, 4.5 for text and 3 for what is drawn.


def luminance(colour):
    channels = np.array([*bytes.fromhex(colour[1:])]) / 255
    low, high = channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
    return np.where(channels <= 0.04045, low, high) @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out(theme):
    found = colours(theme)
    for text in "ink", "muted", "compare", "accent":
        for ground in "card", "stripe", "chosen", "page":
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    marks = "bad", "demote", "promote", "skip", "line-1", "line-2", "line-3"
    for mark in marks:
        assert contrast(found[mark], found["card"]) >= 3, mark
