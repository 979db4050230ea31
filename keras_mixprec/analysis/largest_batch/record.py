"""The trials of a search on disk, so that it goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

from keras_mixprec._files import check_regular, write_json
from keras_mixprec.analysis.resume import check_same

FORMAT = "keras_mixprec.largest_batch"
VERSION = 1


class Record:
    """What has been tried so far, written after each trial.

    Args:
        path: String or path object, `None` for no file. One that is there is
            continued.
        asked: Dict that JSON can hold: all that the answer depends on.

    Raises:
        ValueError: If the file is of another search, or of none.
    """

    def __init__(self, path: str | os.PathLike | None, asked: dict):
        self._path = None if path is None else Path(path).absolute()
        self._content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "asked": asked,
            "searches": {},
        }
        if path is not None:
            check_regular(path)
            if os.path.exists(path):
                self._content["searches"] = _read(path, asked)

    def search(self, policy: str) -> dict[str, Any]:
        """Returns what is known of a policy: a dict to be added to.

        Its `trials` are a list; `predicted` is there once it was asked for.
        """
        return self._content["searches"].setdefault(policy, {"trials": []})

    def save(self) -> None:
        """Writes the file, if there is to be one."""
        if self._path is not None:
            write_json(self._path, self._content)


def _read(path, asked):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        before = dict(content["asked"])
        searches = content["searches"]
        known = content["format"] == FORMAT and content["version"] == VERSION
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(
            "`resume` must be a file that `largest_batch` has written, or one "
            f"that is not there yet. Received: resume={os.fspath(path)!r}"
        )
    check_same(path, "search", asked, before)
    return searches
