"""Finds the line of the user's code that runs an operation."""

import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Iterable

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(
    {
        sysconfig.get_path(name) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_LONGEST = 80


def stack(without: str = "") -> Iterable[tuple[str, int]]:
    """Yields the file and line of each stack frame, innermost first.

    Args:
        without: String. Name of the functions whose frames are left out.
            Defaults to `""`, which leaves out no frames.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name != without:
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def line_of(frames: Iterable[tuple[str, int]]) -> str | None:
    """Returns the line of the user's code, such as `"model.py:12: y = 1 / x"`.

    Args:
        frames: Pairs of file and line, as from `stack`. Frames of keras_mixprec
            at the start are skipped. A later frame of keras_mixprec ends the
            search, because callers of keras_mixprec are not part of the model.

    Returns:
        String, or `None` if the search finds only installed code.
    """
    has_begun = False
    for file, line in frames:
        if file.startswith(_OURS):
            if has_begun:
                return None
        elif not file.startswith(("<", *_INSTALLED)):
            code = linecache.getline(file, line).strip()[:_LONGEST]
            return f"{os.path.basename(file)}:{line}: {code}".rstrip(": ")
        else:
            has_begun = True
    return None
