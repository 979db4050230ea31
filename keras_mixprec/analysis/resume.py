"""Stores the results of a call in a file, so that the same call can continue.

Fingerprints tell whether two calls are the same. A fingerprint covers the code
of functions and of all functions that they call, the bytes of arrays, configs
and settings. For libraries, a fingerprint covers only the versions.
"""

import contextlib
import dis
import functools
import hashlib
import importlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mixprec._checks import check_type
from keras_mixprec._console import one_line
from keras_mixprec._files import check_regular, write_json
from keras_mixprec.analysis.doctor.machine import find_versions
from keras_mixprec.backend import active
from keras_mixprec.devices.found import find_devices, list_devices
from keras_mixprec.policies.matmul_precision import in_force

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


VERSION = 1


class ResumeFile:
    """A file with the results of a call so far.

    Args:
        path: String or path-like, `None` for no file. If the file exists, its
            results are loaded.
        kind: String. The name of the tool, such as `"largest_batch"`.
        asked: Dict of everything that the results depend on, in JSON types.

    Attributes:
        found: Dict of results, to which the caller adds. The values are JSON
            types and non-finite numbers.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If the file is damaged, or belongs to a different call.
        OSError: If the file cannot be read.
    """

    def __init__(self, path: Any, kind: str, asked: dict):
        self._path: Path | None = None
        if path is not None:
            what = "the path of a JSON file"
            check_type("resume", path, str | os.PathLike, what)
            self._path = Path(path).absolute()
        self._head = {"format": f"keras_mixprec.{kind}", "version": VERSION}
        self._asked = asked
        self.found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            check_regular(self._path)
            self._load(self._path)

    def save(self) -> None:
        """Writes the file, or keeps the old file if writing fails."""
        if self._path is not None:
            content = {"asked": self._asked, "found": self.found}
            write_json(self._path, {**self._head, **content})

    def _load(self, path):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            before, self.found = dict(content["asked"]), dict(content["found"])
            known = self._head.items() <= content.items()
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise ValueError(
                "The file is damaged, or a different tool wrote it. Delete it "
                f"to start over. Received: resume={str(path)!r}"
            )
        check_same(path, self._asked, before)


def check_same(
    path: str | os.PathLike, asked: Mapping, before: Mapping
) -> None:
    """Raises if a file belongs to a different call.

    Args:
        path: String or path-like. The file.
        asked: Dict of everything that the results depend on. The error
            message quotes the keys.
        before: The same dict, from the call that wrote the file.

    Raises:
        ValueError: If the dicts differ.
    """
    names = {**asked, **before}
    differing = sorted(n for n in names if asked.get(n) != before.get(n))
    if differing:
        raise ValueError(
            "The file belongs to a different call, which differs in "
            f"{', '.join(differing)}. Delete it, or name a different file. "
            f"Received: resume={os.fspath(path)!r}"
        )


def surroundings() -> dict[str, str]:
    """Returns the entries of `asked` for the machine and its settings."""
    found = find_devices()
    devices = [(d.name, d.memory) for d in list_devices()[1]]
    distribution = getattr(keras.distribution, "distribution", lambda: None)()
    return {
        "backend": found["backend"],
        "device": str([*dict.fromkeys(devices)]),
        "versions": fingerprint(find_versions() | active.runtime().versions()),
        "precision of float32": f"{keras.config.floatx()}, {in_force()}",
        "distribution": repr(distribution),
    }


def fingerprint(*values: Any) -> str:
    """Returns a string that differs if any value differs.

    Args:
        *values: Functions, classes, arrays, layers, containers of these, and
            plain values. Objects from libraries count by class and config.
    """
    walk = _Walk()
    for value in values:
        walk.add(value)
    return walk.found.hexdigest()


def unnamed(config: Any) -> Any:
    """Returns a config without names, which depend on objects made earlier."""
    if isinstance(config, Mapping):
        return {k: unnamed(v) for k, v in config.items() if k != "name"}
    if isinstance(config, list | tuple):
        return [*map(unnamed, config)]
    return config


class _Walk:
    """Hashes objects and everything that they refer to."""

    def __init__(self):
        self.found = hashlib.blake2b(digest_size=16)
        # The objects seen so far, by id. References in this dict keep the
        # objects alive, so that Python does not reuse their ids.
        self._seen = {}

    def add(self, value):
        if isinstance(value, _PLAIN) or value is Ellipsis:
            self._take(type(value).__name__, repr(value))
        elif id(value) in self._seen:
            self._take("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_new(value)

    def _add_new(self, value):
        for kind, add in _KINDS:
            if isinstance(value, kind):
                add(self, value)
                return
        if hasattr(value, "__array__"):
            self._add_array(value)
        else:
            self._add_object(value)

    def _add_all(self, values):
        self._take(type(values).__name__, len(values))
        for value in values:
            self.add(value)

    def _add_mapping(self, value):
        self._take(type(value).__name__)
        self._add_all([*value.items()])

    def _add_set(self, value):
        self._take("set", sorted(map(fingerprint, value)))

    def _add_reduced(self, value):
        self.add(value.__reduce_ex__(2))

    def _add_module(self, value):
        self._take("module", value.__name__)
        file = getattr(value, "__file__", None)
        if file is not None and not _is_library(value.__name__):
            with contextlib.suppress(OSError):
                self.found.update(Path(file).read_bytes())

    def _add_function(self, function):
        module = function.__globals__.get("__name__") or ""
        if _is_library(module):
            self._take("function", module, function.__qualname__)
            # Decorators such as `functools.cache` keep the user's function
            # in `__wrapped__`.
            self.add(getattr(function, "__wrapped__", None))
            return
        self._take("function")
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # The variable of the closure is not set yet.
                self._take("empty")
        self._add_code(function.__code__, function.__globals__)

    def _add_code(self, code, known):
        for step in dis.get_instructions(code):
            name, value = step.opname, step.argval
            self._take(name)
            if isinstance(value, types.CodeType):
                self._add_code(value, known)
            elif name in _LOADS and value in known:
                self.add(known[value])
            elif name == "IMPORT_NAME":
                # An import that fails during hashing would also fail in the
                # function, so ignore the error.
                with contextlib.suppress(Exception):
                    self.add(importlib.import_module(value))
            else:
                self.add(value)

    def _add_class(self, cls):
        self._take("class", cls.__qualname__)
        if _is_of_library(cls):
            self._take(cls.__module__)
            return
        for base in cls.__bases__:
            self.add(base)
        for name, item in vars(cls).items():
            if name not in ("__dict__", "__weakref__", "__module__", "__doc__"):
                self._take(name)
                self.add(item)

    def _add_array(self, value):
        try:
            array = np.asarray(keras.ops.convert_to_numpy(value))
        except Exception:  # The value cannot be read, so only its type counts.
            self._take(type(value).__name__)
            return
        self._take("array", array.dtype, array.shape)
        # The bytes of an object array are addresses, which change with every
        # run, so hash the items instead.
        if array.dtype == object:
            self.add(array.tolist())
        else:
            self.found.update(np.ascontiguousarray(array).tobytes())

    def _add_object(self, value):
        self.add(type(value))
        self.add(getattr(value, "__wrapped__", None))
        if isinstance(value, keras.layers.Layer | keras.optimizers.Optimizer):
            self.add([variable.value for variable in value.variables])
        if hasattr(value, "get_config"):
            try:
                self.add(unnamed(value.get_config()))
                return
            except Exception as error:  # User code may raise any error.
                self._take(one_line(error))
        if not _is_of_library(type(value)):
            self.add(getattr(value, "__dict__", None))

    def _take(self, *parts):
        self.found.update(repr([*map(str, parts)]).encode("utf-8", "replace"))


_KINDS = (
    (types.FunctionType, _Walk._add_function),
    (type, _Walk._add_class),
    (types.ModuleType, _Walk._add_module),
    (Mapping, _Walk._add_mapping),
    (list | tuple, _Walk._add_all),
    (set | frozenset, _Walk._add_set),
    (functools.partial | types.MethodType, _Walk._add_reduced),
    (
        types.BuiltinFunctionType | np.ufunc,
        lambda walk, value: walk._take(value.__name__),
    ),
    (property, lambda walk, value: walk.add(value.fget)),
)


def _is_of_library(thing):
    return _is_library(getattr(thing, "__module__", None) or "builtins")


@functools.cache
def _is_library(name):
    if name.partition(".")[0] in ("keras_mixprec", "builtins"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # Built-in modules and notebooks have no file.
        return name in sys.builtin_module_names
    return os.path.realpath(file).startswith(_LIBRARIES)
