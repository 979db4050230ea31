"""Walking a model's layers and giving each one stable path."""

import difflib
import functools
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterator
from typing import NamedTuple

import keras

from keras_mixprec._checks import check_type
from keras_mixprec.keras_internals import sublayers, to_snake_case

# The path of the model itself. Paths of layers do not contain its name.
MODEL_PATH = "<model>"


class LayerEntry(NamedTuple):
    """A layer and its place in the model.

    Attributes:
        path: String. Names from the model down, joined by `/`.
        layer: The `keras.layers.Layer`.
        parent: The `LayerEntry` that holds it, or `None` in the model itself.
    """

    path: str
    layer: keras.layers.Layer
    parent: "LayerEntry | None"

    def lineage(self) -> Iterator["LayerEntry"]:
        """Yields this entry, the one that holds it, and so on up."""
        entry: LayerEntry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent


def walk(model) -> list[LayerEntry]:
    """Returns every layer below a model, composites before their parts.

    Order and paths depend only on the code that built the model. A path has
    Keras' own names. But the counter in an automatic name, which depends on
    what else the process has built, starts again in each parent: `dense_17` and
    `dense_18` become `dense` and `dense_1`, as in the first model of a process.
    Names that the code gave stay. The model's own name is no part of a path.

    Args:
        model: A `keras.Model`, built or not.

    Returns:
        A list of `LayerEntry`. A shared layer appears once, at its first
        place. `InputLayer`s, which compute nothing, are left out.
    """
    return list(_below(model, None, {id(model)}))


def unnumbered(path: str) -> str:
    """Returns a path without the numbers that its names end in."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def every_place(layer, around: tuple = ()) -> Iterator:
    """Yields a layer and all its sublayers, once for each of their places.

    The order depends on the code alone. If a model and a nested one share a
    layer, Keras may load two layers, and the order is the same.
    """
    yield layer
    for child in _children(layer):
        if not any(child is holder for holder in around):
            yield from every_place(child, (*around, layer))


def walk_with_model(model) -> list[LayerEntry]:
    """Returns the entries of a model's layers and, as the last, of the model.

    A subclassed model casts its inputs as a layer does, and its own code may
    compute something.
    """
    return [*walk(model), LayerEntry(MODEL_PATH, model, None)]


def check_model(model):
    """Returns `model` if it is a Keras model, or raises saying so."""
    return check_type("model", model, keras.Model, "a `keras.Model`")


def is_of_keras(layer) -> bool:
    """Returns whether Keras itself defines a layer's class."""
    return type(layer).__module__.startswith("keras.")


def has_own_step(model) -> bool:
    """Returns whether the user has written the `train_step` of a model.

    The step may be a method of the class or an attribute of the model.
    """
    step = vars(model).get("train_step", type(model).train_step)
    while hasattr(step, STAND_IN):
        step = getattr(step, STAND_IN)
    own = getattr(step, "__func__", step)
    return own is not keras.Model.train_step


# A function that replaces a train step keeps the original in this attribute.
STAND_IN = "_keras_mixprec_step"


def has_own_loss(model) -> bool:
    """Returns whether the user has written the `compute_loss` of a model."""
    return type(model).compute_loss is not keras.Model.compute_loss


def may_grow(layer) -> bool:
    """Returns whether a layer is unbuilt and its `build` may make sublayers."""
    plain = (keras.layers.Layer, keras.Model, keras.Sequential)
    return not layer.built and all(
        type(layer).build is not cls.build for cls in plain
    )


def what_was_meant(path: str, entries: Collection[LayerEntry]) -> str:
    """Returns a guess which layer was meant by a path that no layer has.

    Args:
        path: String, such as the name that `model.summary()` shows.
        entries: Collection of `LayerEntry`, as `walk` returns them.
    """
    paths = [entry.path for entry in entries]
    shown = [
        "/".join(reversed([e.layer.name for e in entry.lineage()]))
        for entry in entries
    ]
    if path in shown:
        found = paths[shown.index(path)]
        return f"Keras calls it so in this process; its path is {found!r}"
    ends = [p for p in paths if p.endswith(f"/{path}")]
    if len(ends) > 1:
        return f"ambiguous, it could be {' or '.join(map(repr, ends))}"
    near = ends or difflib.get_close_matches(path, paths, n=1, cutoff=0)
    return f"the nearest is {near[0]!r}" if near else "the model has no layers"


def _below(holder, parent, seen):
    children = [x for x in _children(holder) if id(x) not in seen]
    prefix = f"{parent.path}/" if parent else ""
    for layer, name in zip(children, _stable_names(children), strict=True):
        # An earlier sibling may also hold this layer.
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        entry = LayerEntry(prefix + name, layer, parent)
        yield entry
        yield from _below(layer, entry, seen)


def _children(holder):
    # Keras lists a layer twice if its parent tracks it twice.
    found = {id(layer): layer for layer in sublayers(holder)}.values()
    inputs = keras.layers.InputLayer
    return [layer for layer in found if not isinstance(layer, inputs)]


def _stable_names(layers):
    """A unique name for each sibling that depends on no counter of Keras.

    Names that the code gave stay. A loaded model does not say which names the
    code gave, so their numbers count as counters.

    Args:
        layers: The sublayers of one parent, in the order Keras tracks them.
    """
    stems = [
        (layer.name, None) if _is_given(layer) else _split_name(layer)
        for layer in layers
    ]
    given = {stem for stem, count in stems if count is None}
    names: dict = {}
    # Keras numbers automatic names in the order of creation.
    for index in sorted(range(len(layers)), key=lambda i: stems[i][1] or 0):
        stem, count = stems[index]
        others = given - {stem} if count is None else given
        numbered = (f"{stem}_{number}" for number in itertools.count(1))
        names[index] = next(
            name
            for name in itertools.chain([stem], numbered)
            if name not in {*names.values(), *others}
        )
    return [names[index] for index in range(len(layers))]


def _split_name(layer):
    """The stem and counter of an automatic name, or the name and None."""
    stem = to_snake_case(type(layer).__name__)
    # `Bidirectional` adds these prefixes to the name of its layer.
    match = re.fullmatch(
        rf"((?:forward_|backward_)?{re.escape(stem)})(?:_([1-9]\d*))?",
        layer.name,
    )
    if match is None:
        return layer.name, None
    return match[1], int(match[2] or 0)


# Keras does not record which names of layers the code gave and which are
# automatic. So this module watches, from its import on, how layers are made.

# The key is the `id` of a name. The values are the name and whether the code
# gave it. A copy that is made from a layer's config has the same string. The
# dict holds the string so that no other string gets its `id`.
_SEEN: dict[int, tuple[str, bool]] = {}


def _is_given(layer) -> bool:
    """Whether the code named a layer, or the original of a copy.

    This is unknown for a loaded layer, and `False`.
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
    """Whether a layer that is being made comes from a config."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _is_constructing(frame, layer):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name.endswith("from_config")


def _is_constructing(frame, layer):
    first = next(iter(frame.f_locals.values()), None)
    # Keras wraps some constructors in functions that take any arguments. The
    # tuple may hold arrays, which `in` would compare by value.
    return first is layer or (
        isinstance(first, tuple) and bool(first) and first[0] is layer
    )


_watch_names()
