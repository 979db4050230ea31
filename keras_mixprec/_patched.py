"""Replaces attributes of objects, classes and modules temporarily."""

import contextlib
import functools
import threading

_NONE = object()


class Replacements:
    """A context that replaces methods of objects.

    After the context, every object is as before. Several threads may enter the
    context, such as the replicas of a `MirroredStrategy`. The context ends when
    the last thread leaves it.
    """

    def __init__(self):
        self._all = {}
        self._before = {}
        self._entered = 0

    def add(self, owner, name: str, function):
        """Replaces `owner.name` in the context, even if it is active now.

        Args:
            owner: An object with a `__dict__`, a module, or a class.
            name: String, the name of a method.
            function: The replacement, in place of any earlier replacement.
        """
        key = id(owner), name
        self._all[key] = owner, name, function
        if self._entered:
            found = owner, name, vars(owner).get(name, _NONE)
            self._before.setdefault(key, found)
            _assign([self._all[key]])

    def __contains__(self, key):
        owner, name = key
        return (id(owner), name) in self._all

    def __enter__(self):
        if not self._entered:
            self._before = {
                key: (owner, name, vars(owner).get(name, _NONE))
                for key, (owner, name, _) in self._all.items()
            }
            _assign(self._all.values())
        self._entered += 1

    def __exit__(self, *exc_info):
        self._entered -= 1
        if not self._entered:
            _assign(self._before.values())
            self._before.clear()


def _assign(attributes):
    for owner, name, function in attributes:
        if isinstance(owner, type):
            if function is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, function)
        elif function is _NONE:
            vars(owner).pop(name, None)
        else:
            # `setattr` on a layer would track the function as a part of the
            # layer's state.
            vars(owner)[name] = function


@contextlib.contextmanager
def patched(owner, functions: dict):
    """Replaces functions of an object or a module inside a `with` block.

    Args:
        owner: An object with a `__dict__`, or a module.
        functions: Dict from names to replacements.
    """
    replacements = Replacements()
    for name, function in functions.items():
        replacements.add(owner, name, function)
    with replacements:
        yield


class _InThreads:
    """A function that each thread may replace for itself."""

    def __init__(self, owner, name):
        original = self._original = getattr(owner, name)
        self.instead: dict[int, list] = {}

        @functools.wraps(original)
        def in_thread(*args, **kwargs):
            return self.current()(*args, **kwargs)

        self.replacements = Replacements()
        self.replacements.add(owner, name, in_thread)

    def current(self):
        own = self.instead.get(threading.get_ident())
        return own[-1] if own else self._original


_IN_THREADS: dict[tuple, _InThreads] = {}
_LOCK = threading.RLock()


def function_here(owner, name: str):
    """Returns the function that `owner.name` stands for in this thread.

    Args:
        owner: As for `patched_here`.
        name: String.
    """
    known = _IN_THREADS.get((id(owner), name))
    return known.current() if known else getattr(owner, name)


@contextlib.contextmanager
def patched_here(owner, functions: dict):
    """Replaces functions inside a `with` block, for this thread only.

    Args:
        owner: A module or a class.
        functions: Dict from names to replacements. If a replacement calls the
            original, get the original from `function_here` before the context
            starts.
    """
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(_one_here(owner, name, function))
        yield


@contextlib.contextmanager
def _one_here(owner, name, function):
    key = id(owner), name
    with _LOCK:
        if key not in _IN_THREADS:
            _IN_THREADS[key] = _InThreads(owner, name)
            _IN_THREADS[key].replacements.__enter__()
        known = _IN_THREADS[key]
        own = known.instead.setdefault(threading.get_ident(), [])
        own.append(function)
    try:
        yield
    finally:
        with _LOCK:
            own.pop()
            if not any(known.instead.values()):
                del _IN_THREADS[key]
                known.replacements.__exit__()
