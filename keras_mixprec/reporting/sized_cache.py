"""What was read or computed from a log, kept within a number of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class SizedCache:
    """Keeps values until what they come from has changed, or room is needed.

    Safe to use from several threads.

    Args:
        size: Int. Bytes to keep, of the values that were asked for last.
        size_of: Function that returns the bytes of a value.

    Example:
    >>> from keras_mixprec.reporting.sized_cache import SizedCache
    >>> cache = SizedCache(1 << 20, len)
    >>> cache.get("greeting", 1, lambda: b"read")
    b'read'
    >>> cache.get("greeting", 1, lambda: b"read again")
    b'read'
    >>> cache.get("greeting", 2, lambda: b"read again")
    b'read again'
    """

    def __init__(self, size: int, size_of: Callable):
        self._size = size
        self._size_of = size_of
        self._held = 0
        self._values: OrderedDict = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, version: Any, read: Callable) -> Any:
        """Returns a value.

        Args:
            key: Which value.
            version: Differs from what it was if the value may have changed.
            read: Function without arguments that returns it.
        """
        with self._lock:
            known = self._values.get(key)
            if known and known[0] == version:
                self._values.move_to_end(key)
                return known[1]
        value = read()
        size = self._size_of(value)
        with self._lock:
            self._forget(key)
            self._values[key] = version, value, size
            self._held += size
            while self._held > self._size and len(self._values) > 1:
                self._forget(next(iter(self._values)))
        return value

    def _forget(self, key):
        _, _, size = self._values.pop(key, (None, None, 0))
        self._held -= size
