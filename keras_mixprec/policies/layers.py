"""Walks a model's layers and gives each one a stable path."""

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
        parent: The `LayerEntry` of the layer that holds it, or `None` if the
            model itself holds it.
    """

    path: str
    layer: keras.layers.Layer
    parent: "LayerEntry | None"

    def lineage(self) -> Iterator["LayerEntry"]:
        """Yields this entry, its parent, and so on up to the top."""
        entry: LayerEntry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent


def walk(model) -> list[LayerEntry]:
    """Returns every layer of a model, composites before their parts.

    Order and paths depend only on the code that built the model. Paths use
    Keras' names, but number automatic names from the start in each parent:
    `dense_17` and `dense_18` become `dense` and `dense_1`. Keras' own counters
    would depend on other models of the process. Names from the user's code
    stay. The model's name is not part of a path.

    Args:
        model: A `keras.Model`, built or not.

    Returns:
        A list of `LayerEntry`. A shared layer appears once, at its first
        place. `InputLayer`s, which compute nothing, are left out.
    """
    return list(_below(model, None, {id(model)}))


def unnumbered(path: str) -> str:
    """Returns a path without the numbers at the ends of its names."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def every_place(layer, around: tuple = ()) -> Iterator:
    """Yields a layer and all its sublayers, once for each place in the model.

    Keras may load a shared layer as two layers. The order is the same in both
    models, because each place counts.
    """
    yield layer
    for child in _children(layer):
        if not any(child is holder for holder in around):
            yield from every_place(child, (*around, layer))


def walk_with_model(model) -> list[LayerEntry]:
    """Returns the entries of a model's layers, then the model's own entry.

    A subclassed model acts as a layer: it casts its inputs, and its own code
    may compute.
    """
    return [*walk(model), LayerEntry(MODEL_PATH, model, None)]


def check_model(model):
    """Returns `model` if it is a Keras model, or raises an error."""
    return check_type("model", model, keras.Model, "a `keras.Model`")


def is_of_keras(layer) -> bool:
    """Returns whether Keras itself defines a layer's class."""
    return type(layer).__module__.startswith("keras.")


def has_own_step(model) -> bool:
    """Returns whether a model has a user-written `train_step`.

    The step may be a method of the class or an attribute of the model.
    """
    step = vars(model).get("train_step", type(model).train_step)
    while hasattr(step, STAND_IN):
        step = getattr(step, STAND_IN)
    own = getattr(step, "__func__", step)
    return own is not keras.Model.train_step


# A function that replaces a train step keeps the original step in an attribute
# of this name.
STAND_IN = "_keras_mixprec_step"


def has_own_loss(model) -> bool:
    """Returns whether a model has a user-written `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def may_grow(layer) -> bool:
    """Returns whether a layer is unbuilt and its `build` may add sublayers."""
    plain = (keras.layers.Layer, keras.Model, keras.Sequential)
    return not layer.built and all(
        type(layer).build is not cls.build for cls in plain
    )


def what_was_meant(path: str, entries: Collection[LayerEntry]) -> str:
    """Returns a hint at the layer that the user may mean by an unknown path.

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
        return f"Keras uses this name here, but the layer's path is {found!r}"
    ends = [p for p in paths if p.endswith(f"/{path}")]
    if len(ends) > 1:
        return f"ambiguous, it could be {' or '.join(map(repr, ends))}"
    near = ends or difflib.get_close_matches(path, paths, n=1, cutoff=0)
    return f"the nearest is {near[0]!r}" if near else "the model has no layers"


def _below(holder, parent, seen):
    children = [x for x in _children(holder) if id(x) not in seen]
    prefix = f"{parent.path}/" if parent else ""
    for layer, name in zip(children, _stable_names(children), strict=True):
        # An earlier sibling may hold the same layer, but each layer gets only
        # one path.
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
    """Returns a unique name for each sibling, independent of Keras' counters.

    Names from the user's code stay. A loaded model does not record their
    origin, so a number at the end of a name counts as automatic.

    Args:
        layers: The sublayers of one parent, in the order in which Keras tracks
            them.
    """
    shown = {layer.name for layer in layers}
    # Keras begins with a name without a number, so `dense_0` is a user's.
    stems = [
        (layer.name, None)
        if _is_given(layer) or f"{_split_name(layer)[0]}_0" in shown
        else _split_name(layer)
        for layer in layers
    ]
    given = {stem for stem, count in stems if count is None}
    names: dict = {}
    # Keras numbers automatic names in the order of creation, so the sorted
    # numbers give the order in which the user's code created the layers.
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
    """Returns stem and counter of an automatic name, or the name and None."""
    stem = to_snake_case(type(layer).__name__)
    # `Bidirectional` adds the prefix `forward_` or `backward_` to the names of
    # its layers.
    match = re.fullmatch(
        rf"((?:forward_|backward_)?{re.escape(stem)})(?:_([1-9]\d*))?",
        layer.name,
    )
    if match is None:
        return layer.name, None
    return match[1], int(match[2] or 0)


# Keras does not record which layer names come from the user's code and which
# are automatic. So this module records the origin of each name, for all layers
# that are created after its import.

# Maps the `id` of a name to the name and to whether the user's code gave it. A
# layer that is copied from a config is found too, because its name is the same
# string object. The dict holds each string, so that Python does not reuse its
# `id`.
_SEEN: dict[int, tuple[str, bool]] = {}


def _is_given(layer) -> bool:
    """Returns whether the user's code named a layer, or the layer it copies.

    For a loaded layer this is unknown, and the result is `False`.
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
    """Returns whether a `from_config` is creating the layer."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _is_constructing(frame, layer):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name.endswith("from_config")


def _is_constructing(frame, layer):
    first = next(iter(frame.f_locals.values()), None)
    # Keras wraps some constructors in functions whose first local variable is
    # the tuple `args`. The expression `layer in args` would compare arrays by
    # value, so compare identities.
    return first is layer or (
        isinstance(first, tuple) and bool(first) and first[0] is layer
    )


_watch_names()
