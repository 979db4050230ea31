"""Runs a model's own code, and restores everything that the code changes."""

import collections
import contextlib
import functools
import random
import sys
import types

import keras
import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.keras_internals import KerasSaveable
from keras_mixprec.numerics.random_numbers import own_random_numbers


@contextlib.contextmanager
def untouched(model: keras.Model):
    """Context manager that restores everything that a train step changes.

    This covers all tensors and variables, random numbers, and the state of
    Python code, such as counters. The random numbers of other threads do not
    change.

    Args:
        model: The `keras.Model`.
    """
    state = PythonState(model)
    try:
        with (
            own_random_numbers() as generators,
            active.undo().undone(model, generators),
        ):
            yield
    finally:
        state.put_back()


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)

_CONTAINERS = (dict, tuple, list, set, collections.deque, np.ndarray)

# The maximum number of elements of a list or array to restore. Larger lists and
# arrays hold data rather than state.
_MOST = 1000

# Objects from these modules are not searched, because they hold none of the
# user's state, or share state with other threads.
_FOREIGN = {*sys.stdlib_module_names, "numpy", "jax", "jaxlib", "torch"}
_FOREIGN |= {"tensorflow", "keras", "keras_mixprec"}
_FOREIGN -= {"__main__"}


class PythonState:
    """The numbers, strings and tensors that a model's Python code may change.

    The search covers the attributes of the model, its layers and optimizers,
    and of all objects, lists and dicts that these hold. It also covers the
    closure variables of the user's code, and the global variables that this
    code names.

    Args:
        model: The `keras.Model`.
    """

    def __init__(self, model: keras.Model):
        self._spaces: list = []
        self._named: list = []
        self._cells: list = []
        self._lists: list = []
        self._arrays: list = []
        self._generators: list = []
        self._seen: dict = {}
        waiting = [model]
        while waiting:
            waiting += self._visit(waiting.pop())

    def put_back(self):
        """Restores the state."""
        for space, before in self._spaces:
            _put_back(space, before)
        for owner, before in self._named:
            for name, value in before.items():
                now = _read(owner, name)
                if now is not value and _is_data(now):
                    _write(owner, name, value)
        for cell, value in self._cells:
            cell.cell_contents = value
        for held, before in self._lists:
            if all(map(_is_data, held)) and not _same(held, before):
                _fill(held, before)
        for array, before in self._arrays:
            np.copyto(array, before)
        for put, state in self._generators:
            put(state)

    def all_of(self, cls: type) -> list:
        """Returns the objects of a class that were visited."""
        return [x for x in self._seen.values() if isinstance(x, cls)]

    def _visit(self, value):
        """Keeps the state of one object; returns what it holds."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        if isinstance(value, _CONTAINERS):
            return self._visit_container(value)
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, types.FunctionType):
            return self._visit_function(value)
        known = _generator(value)
        if known:
            self._generators.append(known)
            return []
        return self._visit_object(value)

    def _visit_container(self, value):
        if isinstance(value, np.ndarray):
            if value.size <= _MOST and value.flags.writeable:
                self._arrays.append((value, value.copy()))
            return []
        if len(value) > _MOST:
            return []
        if isinstance(value, dict):
            self._spaces.append((value, dict(value)))
            return list(value.values())
        if not isinstance(value, tuple) and all(map(_is_data, value)):
            self._lists.append((value, list(value)))
            return []
        return list(value)

    def _visit_function(self, function):
        if _is_foreign(function.__module__):
            return []
        held = [*(function.__defaults__ or ())]
        for cell in function.__closure__ or ():
            # A cell without contents raises a `ValueError`.
            with contextlib.suppress(ValueError):
                held.append(cell.cell_contents)
                if _is_data(held[-1]):
                    self._cells.append((cell, held[-1]))
        space = function.__globals__
        named = {n: space[n] for n in _names(function.__code__) if n in space}
        data = {n: x for n, x in named.items() if _is_data(x)}
        self._named.append((space, data))
        return [*held, *named.values()]

    def _visit_object(self, value):
        if isinstance(value, (type, types.ModuleType)):
            return []
        cls = type(value)
        own = [c for c in cls.__mro__ if not _is_foreign(c.__module__)]
        if not own and not isinstance(value, KerasSaveable):
            return []
        held = []
        for part in own:
            if id(part) not in self._seen:
                self._seen[id(part)] = part
                # Copy the class' dict, because TensorFlow adds to an enum that
                # it inspects.
                held_by_class = dict(vars(part))
                data = {n: x for n, x in held_by_class.items() if _is_data(x)}
                data = {n: x for n, x in data.items() if n[:2] != "__"}
                self._named.append((part, data))
                held += [getattr(f, "fget", f) for f in vars(part).values()]
        space = getattr(value, "__dict__", None)
        if space is not None:
            self._spaces.append((space, dict(space)))
            held += [x for n, x in space.items() if not _is_ours(n)]
        return held


def _generator(value):
    """Returns a function that restores a generator's state, and the state."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.set_state, value.get_state()
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state"), bits.state
    if hasattr(value, "get_state") and hasattr(value, "initial_seed"):
        # Only torch's generators have `get_state` and `initial_seed`.
        return value.set_state, value.get_state()
    return None


def _is_foreign(module):
    top, _, rest = (module or "").partition(".")
    return top in _FOREIGN and not rest.startswith("loss_scaling.")


def _is_ours(name):
    return str(name).startswith("_keras_mixprec")


def _names(code):
    """Returns all names in a function and in the functions within it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_data(value, depth=4):
    if isinstance(value, _PLAIN) or ops.is_tensor(value):
        return True
    if isinstance(value, np.ndarray):
        return True
    if not depth or not isinstance(value, (list, tuple, dict, set)):
        return False
    if len(value) > _MOST:
        return False
    values = value.values() if isinstance(value, dict) else value
    return all(_is_data(x, depth - 1) for x in values)


def _put_back(space, before):
    # Keep the attributes of an object that was built after the copy was made.
    if any(space.get(n) and not before.get(n) for n in ("built", "_built")):
        return
    for name in [*space]:
        now = space[name]
        if name not in before:
            if _is_data(now) and not _is_ours(name):
                dict.__delitem__(space, name)
        elif now is not before[name] and _is_data([before[name], now]):
            dict.__setitem__(space, name, before[name])
    for name in before.keys() - space.keys():
        if _is_data(before[name]):
            dict.__setitem__(space, name, before[name])


def _read(owner, name):
    space = owner if isinstance(owner, dict) else vars(owner)
    return space.get(name)


def _write(owner, name, value):
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _same(held, before):
    pairs = zip(held, before, strict=False)
    return len(held) == len(before) and all(a is b for a, b in pairs)


def _fill(held, before):
    if isinstance(held, list):
        list.__setitem__(held, slice(None), before)
    else:
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(before)
