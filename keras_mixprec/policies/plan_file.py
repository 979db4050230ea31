"""A plan on disk: JSON with a version, written at once or not at all."""

import contextlib
import glob
import json
import os
import secrets
import shutil
import time
from pathlib import Path

from keras_mixprec._files import check_regular, try_lock

FORMAT = "keras_mixprec.plan"
VERSION = 1

# What is being written ends in this, until it is whole.
_UNFINISHED = ".mixprec.tmp"

# It is locked within microseconds of its creation, and written in as many
# milliseconds.
_UNFINISHED_SECONDS = 10


def write(path, plan, tuner: dict | None = None):
    """Writes a plan, so that a reader sees the old file or the new one.

    The file keeps its permissions, and a link to it stays one. What a killed
    process left half-written beside it is removed.

    Args:
        path: String or path object.
        plan: A `PrecisionPlan`.
        tuner: Dict that JSON can hold: what the tuner that made the plan
            needs to go on. Defaults to `None`, no tuner made it.

    Raises:
        OSError: If it cannot be written; the old file is left as it was.
    """
    path = Path(os.path.realpath(path))
    check_regular(path)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "default": plan.default,
        "layers": [_entry(plan, name) for name in plan],
    }
    if tuner is not None:
        content["tuner"] = tuner
    _remove_unfinished(path)
    # Beside the target, because a rename is atomic within one disk only.
    unfinished = f"{path}.{secrets.token_hex(4)}{_UNFINISHED}"
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            try_lock(file)
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def _remove_unfinished(path):
    """Removes what killed processes left: old, and locked by nobody."""
    for other in glob.glob(f"{glob.escape(str(path))}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(other, "r+b") as file:
            age = time.time() - os.fstat(file.fileno()).st_mtime
            if age > _UNFINISHED_SECONDS and try_lock(file):
                os.unlink(other)


def read(path) -> dict:
    """Returns the arguments of the `PrecisionPlan` that a file holds.

    Raises:
        ValueError: If the file is not a plan, or a newer one.
    """
    content = _content(path)
    layers = content["layers"]
    default = content.get("default", "float32")
    _require(path, isinstance(default, str), "`default` must be a string")
    return {
        "policies": {entry["path"]: entry["policy"] for entry in layers},
        "default": default,
        "reasons": {e["path"]: e["reason"] for e in layers if "reason" in e},
        "notes": {e["path"]: e["note"] for e in layers if "note" in e},
    }


def read_tuner(path) -> dict:
    """Returns what a tuner left in the file, empty if none did."""
    tuner = _content(path).get("tuner", {})
    _require(path, isinstance(tuner, dict), "`tuner` must be an object")
    return tuner


def _content(path):
    try:
        check_regular(path)
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        # Half of a surrogate pair is JSON, but no text.
        json.dumps(content, ensure_ascii=False).encode()
    except FileExistsError as error:
        raise ValueError(f"A plan is a file. Received: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "The file is not JSON; it is damaged or was cut short. Delete it "
            f"to start from a new plan. Received: path={str(path)!r} ({error})"
        ) from error
    _check_header(path, content)
    layers = content.get("layers")
    _require(path, isinstance(layers, list), "`layers` must be a list")
    for entry in layers:
        _check_entry(path, entry)
    paths = [entry["path"] for entry in layers]
    _require(path, len(set(paths)) == len(paths), "it names a path twice")
    return content


def _entry(plan, path):
    entry = {"path": path, "policy": plan[path]}
    if path in plan.reasons:
        entry["reason"] = plan.reasons[path]
    if path in plan.notes:
        entry["note"] = plan.notes[path]
    return entry


def _check_header(path, content):
    _require(
        path,
        isinstance(content, dict) and content.get("format") == FORMAT,
        f"`format` must be {FORMAT!r}",
    )
    version = content.get("version")
    _require(
        path,
        type(version) is int and version >= 1,
        "`version` must be a positive integer",
    )
    if version > VERSION:
        raise ValueError(
            "The plan was written by a newer keras_mixprec: this one reads "
            f"version {VERSION}. Received: version={version} in {str(path)!r}"
        )


def _check_entry(path, entry):
    fields = ("path", "policy", "reason", "note")
    _require(
        path,
        isinstance(entry, dict)
        and {"path", "policy"} <= set(entry)
        and all(isinstance(entry.get(field, ""), str) for field in fields),
        f"an entry needs `path` and `policy` as strings, not {entry!r}",
    )


def _require(path, condition, expectation):
    if not condition:
        raise ValueError(
            f"The file is not a precision plan: {expectation}. "
            f"Received: path={str(path)!r}"
        )
