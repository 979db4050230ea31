"""Which names of layers the code gave, and which Keras made.

Keras keeps no note of it, and the number that it ends an automatic name in
depends on what else the process has built. So layers are looked at when they
are made, from the import of this module on.
"""

import functools
import sys
import types

import keras

# By the identity of a string, whether the code gave it as a name. A copy that
# is made from a layer's config has the same string. It is kept, so that no
# other gets its identity.
_SEEN: dict[int, tuple[str, bool]] = {}


def is_given(layer) -> bool:
    """Whether the code named a layer, or the one that it is a copy of.

    Not known of one that was loaded.
    """
    return _SEEN.get(id(layer.name), ("", False))[1]


def _watch_names():
    construct = keras.Operation.__init__

    @functools.wraps(construct)
    def __init__(self, name=None):
        construct(self, name)
        if isinstance(self, keras.layers.Layer) and id(self.name) not in _SEEN:
            given = name is not None and not _from_config(self)
            _SEEN[id(self.name)] = self.name, given

    keras.Operation.__init__ = __init__


def _from_config(layer):
    """Whether a layer, which is being constructed, is made from a config."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _is_constructing(frame, layer):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name.endswith("from_config")


def _is_constructing(frame, layer):
    first = next(iter(frame.f_locals.values()), None)
    # Keras wraps some constructors in functions that take anything. This does
    # not use `in`, because the tuple may hold arrays, which `==` compares.
    return first is layer or (
        isinstance(first, tuple) and bool(first) and first[0] is layer
    )


_watch_names()
