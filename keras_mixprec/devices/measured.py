"""The doctor's measurements on these devices, kept for the next process.

Each combination of devices, backend and versions has a file, in the folder
`KERAS_MIXPREC_CACHE_DIR` or else in Keras' own. A file that is damaged or
belongs to another combination is ignored.
"""

import datetime
import hashlib
import json
import math
import os
import pathlib
from typing import NamedTuple

from keras_mixprec._files import write_json

_SCHEMA = 1
_FOLDER, _NAME = "KERAS_MIXPREC_CACHE_DIR", "keras_mixprec"
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
        wrong: Tuple of the formats that gave wrong results.
        date: String, such as `"2026-11-23"`.
        quick: Boolean. If `True`, it took seconds and is less exact.
    """

    speed: dict
    wrong: tuple
    date: str
    quick: bool


def load(capabilities: dict) -> Measured | None:
    """Returns what was measured on the same devices, `None` if nothing was.

    Args:
        capabilities: Dict, as `find_devices` returns.
    """
    try:
        found = json.loads(_path(capabilities).read_text())
        of = found.pop("schema"), found.pop("of")
        if of != (_SCHEMA, _of(capabilities)):
            return None
        known = Measured(**found)
        datetime.date.fromisoformat(known.date)
        if all(0 < ratio < math.inf for ratio in known.speed.values()):
            return known._replace(wrong=tuple(known.wrong))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        pass
    except AttributeError:  # JSON, but of another form.
        pass
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
    content = {"schema": _SCHEMA, "of": _of(capabilities)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content | measured._asdict())
    except OSError:
        return ""
    return str(path)


def _of(capabilities):
    # The stored values have been through JSON, so these must be too.
    found = {key: capabilities.get(key) for key in _KEYS}
    return json.loads(json.dumps(found))


def _path(capabilities):
    text = json.dumps(_of(capabilities), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # Keras keeps its own settings there.
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras"), _NAME)
    folder = pathlib.Path(os.environ.get(_FOLDER) or home).expanduser()
    return folder / f"doctor-{digest}.json"
