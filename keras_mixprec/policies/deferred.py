"""Policies for sublayers that do not exist before their parent is built."""

import functools
import weakref

from keras_mixprec.policies.layers import may_grow, walk


def after_build(model, entries, follow):
    """Calls `follow` with each layer that appears when others are built.

    Args:
        model: The `keras.Model`.
        entries: List of `LayerEntry`, the layers it has now.
        follow: Function of a `LayerEntry` that sets the layer's policy. It
            replaces what an earlier call registered.
    """
    known = {id(entry.layer) for entry in entries}
    # A strong reference would keep the model alive in a cycle.
    model_ref = weakref.ref(model)

    def adopt():
        for entry in walk(model_ref()):
            if id(entry.layer) not in known:
                known.add(id(entry.layer))
                follow(entry)
                _hook(entry.layer, adopt)

    for layer in [model, *(entry.layer for entry in entries)]:
        _hook(layer, adopt)


def _hook(layer, adopt):
    """Makes a layer call `adopt` once, when it has been built."""
    original = getattr(layer.build, "_mixprec_original", layer.build)
    if not may_grow(layer):
        return

    @functools.wraps(original)
    def build(*args, **kwargs):
        layer.build = original
        before = len(layer._flatten_layers())
        original(*args, **kwargs)
        if len(layer._flatten_layers()) > before:
            adopt()

    build._mixprec_original = original
    layer.build = build
