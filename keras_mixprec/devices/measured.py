"""What the doctor measured on these devices, kept for the next process.

A file for each combination of devices, backend and versions, in the user's
folder for caches. One that is damaged, or of anything else, is ignored.
"""

import datetime
import hashlib
import json
import math
import os
import pathlib
import platform
import tempfile
from typing import NamedTuple

_SCHEMA = 1
_FOLDER = "KERAS_MIXPREC_CACHE_DIR"
_KEYS = (
    "backend",
    "version",
    "keras",
    "kind",
    "devices",
    "compute_capability",
    "instructions",
)


class Measured(NamedTuple):
    """What was measured.

    Attributes:
        speed: Dict from a format to how many times as fast as in float32 a
            small transformer block trains in it.
        wrong: Tuple of the formats in which results were wrong.
        date: String, such as `"2026-11-23"`.
        quick: Boolean. Whether it was measured in a hurry.
    """

    speed: dict
    wrong: tuple
    date: str
    quick: bool


def cache_folder() -> pathlib.Path:
    """Returns where measurements are kept.

    `KERAS_MIXPREC_CACHE_DIR` if that is set, else `keras_mixprec` in the
    system's folder for caches, such as `~/.cache`.
    """
    if given := os.environ.get(_FOLDER):
        return pathlib.Path(given)
    home = pathlib.Path.home()
    system = platform.system()
    if system == "Windows":
        local = os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")
        return pathlib.Path(local) / "keras_mixprec" / "Cache"
    if system == "Darwin":
        return home / "Library" / "Caches" / "keras_mixprec"
    caches = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return pathlib.Path(caches) / "keras_mixprec"


def load(capabilities: dict) -> Measured | None:
    """Returns what was measured on the same devices, `None` if nothing was.

    Args:
        capabilities: Dict, as `find_devices` returns.
    """
    try:
        found = json.loads(_path(capabilities).read_text())
        if found["schema"] != _SCHEMA or found["of"] != _of(capabilities):
            return None
        speed = {str(k): float(v) for k, v in found["speed"].items()}
        if not all(0 < v < math.inf for v in speed.values()):
            return None
        date = datetime.date.fromisoformat(found["date"]).isoformat()
        wrong = tuple(map(str, found["wrong"]))
        return Measured(speed, wrong, date, bool(found["quick"]))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    except AttributeError:  # JSON, but of another form.
        return None


def save(capabilities: dict, measured: Measured) -> str:
    """Keeps a measurement, unless a more thorough one is there.

    Args:
        capabilities: Dict, as `find_devices` returns.
        measured: `Measured`.

    Returns:
        String. The file's path, `""` if it could not be written.
    """
    known = load(capabilities)
    path = _path(capabilities)
    if known and measured.quick and not known.quick:
        return str(path)
    content = {
        "schema": _SCHEMA,
        "of": _of(capabilities),
        **measured._asdict(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, whoever else writes it now.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return ""
    return str(path)


def _of(capabilities):
    # As JSON hands it back.
    found = {key: capabilities.get(key) for key in _KEYS}
    return json.loads(json.dumps(found))


def _path(capabilities):
    text = json.dumps(_of(capabilities), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_folder() / f"doctor-{digest}.json"
