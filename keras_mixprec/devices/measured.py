"""Stores the measurements of `doctor` for later processes.

Each combination of devices, backend and versions has its own file. The files
are in the folder `KERAS_MIXPREC_CACHE_DIR`, by default in Keras' own folder.
Damaged files, and files of a different combination, are ignored.
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


class Measured(NamedTuple):
    """The measurements of one run of `doctor`.

    Attributes:
        speed: Dict from a format to the training speed of a small transformer
            block, as a multiple of float32's.
        wrong: Tuple of the formats that gave wrong results.
        date: String, such as `"2026-11-23"`.
        quick: Boolean. Quick measurements take seconds and are less exact.
    """

    speed: dict
    wrong: tuple
    date: str
    quick: bool


def load(capabilities: dict) -> Measured | None:
    """Returns the stored measurement of the same devices, or `None`.

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
    except Exception:  # A damaged file may cause any kind of error.
        pass
    return None


def save(capabilities: dict, measured: Measured) -> str:
    """Stores a measurement, unless a more exact one is already stored.

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
    # JSON turns tuples into lists, so do the same here before a comparison with
    # stored values.
    return json.loads(json.dumps(capabilities))


def _path(capabilities):
    text = json.dumps(_of(capabilities), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # Keras keeps its own settings in the same folder.
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras"), _NAME)
    folder = pathlib.Path(os.environ.get(_FOLDER) or home).expanduser()
    return folder / f"doctor-{digest}.json"
