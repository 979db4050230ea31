"""The colours of the page, for pictures: both read one table."""

import json

import numpy as np

from keras_mixprec.reporting.report_page import static

COLOURS = json.loads(
    static("colors.js").partition("=")[2].strip().removesuffix(";")
)


def category(name: str) -> np.ndarray:
    """Returns a colour of the page as RGB between 0 and 1."""
    return np.array(COLOURS["category"][name]) / 255


def level(name: str) -> np.ndarray:
    """Returns the colour of `"bad"`, `"warning"`, `"zero"` or `"beyond"`."""
    if name == "beyond":
        return np.array(COLOURS["beyond"]) / 255
    return category(COLOURS["levels"][name])


def headroom_colours(bits: np.ndarray, wider: np.ndarray) -> np.ndarray:
    """Returns what `palette.js` shows of these numbers.

    Args:
        bits: Array of headrooms in bits: NaN if not measured, infinite if all
            numbers were zero.
        wider: Boolean array, whether it was computed in a dtype of more
            range than the format's.

    Returns:
        Array `[..., 4]`, RGBA between 0 and 1.
    """
    limits = COLOURS["headroom"]
    low, high = limits["warning"], limits["full"]
    place = (high - bits) / (high - low) * limits["ramp"]
    colours = np.ones((*bits.shape, 4))
    colours[..., :3] = _ramp(place)
    colours[(bits < low) & ~wider, :3] = level("warning")
    colours[bits <= 0, :3] = level("bad")
    colours[(bits <= 0) & wider, :3] = level("beyond")
    colours[bits == -np.inf, :3] = level("bad")
    colours[bits == np.inf, :3] = level("zero")
    colours[np.isnan(bits)] = 0
    return colours


def _ramp(place):
    ramp = np.array(COLOURS["ramp"]) / 255
    at = np.nan_to_num(np.clip(place, 0, 1)) * (len(ramp) - 1)
    channels = [np.interp(at, np.arange(len(ramp)), c) for c in ramp.T]
    return np.stack(channels, axis=-1)
