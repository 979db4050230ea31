"""The file of an interrupted call, and whether it is of the same call.

What decides is a fingerprint of each thing that was asked for: the code of
functions with all that it reaches, the bytes of arrays, configs and settings.
Libraries count by their versions.
"""

import dis
import functools
import hashlib
import importlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mixprec._console import one_line
from keras_mixprec._files import check_regular, write_json
from keras_mixprec.analysis.doctor.versions import find_versions
from keras_mixprec.backend import active
from keras_mixprec.devices.found import find_devices, list_devices
from keras_mixprec.policies.matmul_precision import in_force

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


VERSION = 1


class ResumeFile:
    """What a call has found so far, for when it is interrupted.

    Args:
        path: String or path-like, `None` for no file. One that is there is
            continued.
        kind: String. What the call does, such as `"largest_batch"`.
        asked: Dict from all that the answer depends on to what JSON can hold.

    Attributes:
        found: Dict, to be added to; JSON, with numbers that are not finite.

    Raises:
        TypeError: If `path` is none.
        ValueError: If the file is damaged, or that of another call.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Any, kind: str, asked: dict):
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(
                "`resume` must be the path of a JSON file. "
                f"Received: resume={path!r} of type {type(path).__name__}"
            )
        self._path = None if path is None else Path(path).absolute()
        self._head = {"format": f"keras_mixprec.{kind}", "version": VERSION}
        self._asked = asked
        self.found: dict[str, Any] = {}
        if self._path is not None:
            check_regular(self._path)
            if self._path.exists():
                self._load()

    def save(self) -> None:
        """Writes it, at once or not at all."""
        if self._path is not None:
            content = {"asked": self._asked, "found": self.found}
            write_json(self._path, {**self._head, **content})

    def _load(self):
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            head = {name: content[name] for name in self._head}
            before, self.found = dict(content["asked"]), dict(content["found"])
            known = head == self._head
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise ValueError(
                "`resume` must be a file that this call has written, or one "
                "that is not there yet; this one is not, or is damaged. Delete "
                f"it to begin again. Received: resume={str(self._path)!r}"
            )
        check_same(self._path, "search", self._asked, before)


def check_same(
    path: str | os.PathLike, kind: str, asked: Mapping, before: Mapping
) -> None:
    """Raises if a file is the result of another question.

    Args:
        path: String or path-like. The file.
        kind: String. What the file is of, such as `"search"`.
        asked: Dict of what this call asks for, by names for people.
        before: Dict of what the file was asked for.

    Raises:
        ValueError: If they differ. The message names what does.
    """
    names = {**asked, **before}
    differing = sorted(n for n in names if asked.get(n) != before.get(n))
    if differing:
        raise ValueError(
            f"`resume` is the file of another {kind}: it differs in "
            f"{', '.join(differing)}. Delete it, or name another. "
            f"Received: resume={os.fspath(path)!r}"
        )


def surroundings() -> dict[str, str]:
    """Returns what results depend on beside the arguments of a call."""
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
    """Returns a string that is another one if any value is.

    Args:
        *values: Functions, classes, arrays, layers, containers of these, and
            plain values. Of an object of another library, its class counts.
    """
    walk = _Walk()
    for value in values:
        walk.add(value)
    return walk.found.hexdigest()


def unnamed(config: Any) -> Any:
    """Returns a config without names, which count what else was made."""
    if isinstance(config, Mapping):
        return {k: unnamed(v) for k, v in config.items() if k != "name"}
    if isinstance(config, list | tuple):
        return [*map(unnamed, config)]
    return config


class _Walk:
    """A hash that takes in objects with all that they refer to."""

    def __init__(self):
        self.found = hashlib.blake2b(digest_size=16)
        # Kept, so that no id is used again.
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

    def _add_partial(self, value):
        self._add_all([value.func, value.args, value.keywords])

    def _add_method(self, value):
        self._add_all([value.__func__, value.__self__])

    def _add_module(self, value):
        self._take("module", value.__name__)

    def _add_function(self, function):
        module = function.__globals__.get("__name__") or ""
        if _is_library(module):
            self._take("function", module, function.__qualname__)
            # What a decorator of a library has wrapped.
            self.add(getattr(function, "__wrapped__", None))
            return
        self._take("function")
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # Not set yet.
                self._take("empty")
        self._add_code(function.__code__, function.__globals__)

    def _add_code(self, code, known):
        self._take("code", code.co_code.hex(), code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant, known)
            else:
                self.add(constant)
        for name in _globals_of(code):
            if name in known:
                self.add(known[name])
                self._add_used(known[name], code.co_names)
        for module in _imported(code, known):
            self._add_used(module, code.co_names)

    def _add_used(self, module, names):
        """What code takes of a module of the user's."""
        known = isinstance(module, types.ModuleType)
        if known and not _is_library(module.__name__):
            for name in names:
                if hasattr(module, name):
                    self.add(getattr(module, name))

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
        except Exception:  # On a device of its own, or not filled yet.
            self._take(type(value).__name__)
            return
        self._take("array", array.dtype, array.shape)
        # Of objects the bytes would be addresses.
        if array.dtype == object:
            self.add(array.tolist())
        else:
            self.found.update(np.ascontiguousarray(array).tobytes())

    def _add_object(self, value):
        self.add(type(value))
        self.add(getattr(value, "__wrapped__", None))
        if isinstance(value, types.BuiltinFunctionType | np.ufunc):
            self._take(value.__name__)
        if isinstance(value, keras.layers.Layer | keras.optimizers.Optimizer):
            self.add([variable.value for variable in value.variables])
        if hasattr(value, "get_config"):
            try:
                self.add(unnamed(value.get_config()))
                return
            except Exception as error:  # Of the user's code, of any kind.
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
    (functools.partial, _Walk._add_partial),
    (types.MethodType, _Walk._add_method),
    (property, lambda walk, value: walk.add(value.fget)),
)


def _is_of_library(thing):
    return _is_library(getattr(thing, "__module__", None) or "builtins")


@functools.cache
def _is_library(name):
    if name.partition(".")[0] in ("keras_mixprec", "builtins"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # Built in, or typed in a notebook.
        return name in sys.builtin_module_names
    return os.path.realpath(file).startswith(_LIBRARIES)


def _globals_of(code):
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    found = (s.argval for s in dis.get_instructions(code) if s.opname in loads)
    return dict.fromkeys(found)


def _imported(code, known) -> Iterable[types.ModuleType]:
    """The modules of the user's that code imports when it runs."""
    steps = [*dis.get_instructions(code)]
    for place, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        level = steps[place - 2].argval
        name = "." * level + step.argval if level else step.argval
        try:
            yield importlib.import_module(name, known.get("__package__"))
        except Exception:  # Which the function meets as well.
            continue
