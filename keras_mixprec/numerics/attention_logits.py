"""The logits of attention, from inside of the layers that compute them.

The attention layers of Keras and KerasHub hand their logits to a `Softmax`
layer inside of them or to `ops.softmax`, or they hand query and key to
`ops.dot_product_attention`, as `MultiHeadAttention` does without dropout. That
function does not show its logits, so the product is computed once more in a
step that is measured.
"""

import math

import keras
from keras import ops

from keras_mixprec.numerics.layer_hooks import CallHook

# Logits this low or lower have a mask added to them: -1e4, -1e9 and half of the
# lowest number of a format are in use.
_MASK = -1e4

# Elements of the logits up to which they are computed once more: 64 MiB.
_MOST = 2**24

# The size that an unknown dimension counts as.
_USUAL_BATCH = 64


def logits_hook(entries, on_call, put) -> CallHook:
    """Returns a hook on layer calls that takes the logits as well.

    Args:
        entries: As for `CallHook`.
        on_call: As for `CallHook`.
        put: As for `AttentionLogits`.
    """
    logits = AttentionLogits(entries, put)

    def seen(run, layer, path, index, args, kwargs):
        logits.of_softmax(layer, hook.enclosing, args, kwargs)
        return on_call(run, layer, path, index, args, kwargs)

    hook = CallHook(entries, seen, logits.of_function)
    return hook


class AttentionLogits:
    """Takes the logits of each attention layer in one step.

    Args:
        entries: List of `LayerEntry`, the layers of the model.
        put: Function `(name, position, tensor)` that is given the logits of a
            call of a layer by the name of the call; `position` counts them.
    """

    def __init__(self, entries, put):
        self._softmaxes = {
            id(entry.layer) for entry in entries if _is_inside_layer(entry)
        }
        self._put = put
        self._counts = {}

    def of_softmax(self, layer, enclosing, args, kwargs):
        """Takes what a `Softmax` inside of a layer is given.

        Args:
            layer: The layer that is called.
            enclosing: String. The name of the call that it is called in,
                `None` if it is in none.
            args: Tuple, what it is given.
            kwargs: Dict, what it is given.
        """
        if id(layer) in self._softmaxes and enclosing is not None:
            self._take_unmasked(enclosing, [*args, *kwargs.values()][0])

    def of_function(self, function, layer, name, arguments):
        """Takes what one of `layer_hooks.FUNCTIONS` is given; see `CallHook`.

        Args:
            function: String.
            layer: The layer that calls it.
            name: String. The name of its call.
            arguments: Dict.
        """
        if function == "dot_product_attention":
            parts = (arguments.get(n) for n in ("query", "key", "scale"))
            self._take_product(name, *parts)
        elif "Attention" in type(layer).__name__:
            self._take_unmasked(name, arguments["x"])

    def _take_unmasked(self, name, logits):
        logits = ops.stop_gradient(logits)
        self._take(name, ops.where(logits > _MASK, logits, 0))

    def _take_product(self, name, query, key, scale):
        query, key = map(ops.stop_gradient, (query, key))
        batch, length, heads, size = query.shape
        keys, groups = key.shape[1:3]
        numbers = (batch, heads, length, keys)
        if math.prod(n or _USUAL_BATCH for n in numbers) > _MOST:
            return
        query, key = (ops.cast(x, "float32") for x in (query, key))
        key = ops.repeat(key, heads // groups, axis=2)
        scale = 1 / math.sqrt(size) if scale is None else scale
        logits = ops.einsum("btnh,bsnh->bnts", query, key) * scale
        self._take(name, logits)

    def _take(self, name, logits):
        position = self._counts[name] = self._counts.get(name, -1) + 1
        self._put(name, position, logits)


def _is_inside_layer(entry):
    return (
        isinstance(entry.layer, keras.layers.Softmax)
        and entry.parent is not None
        and not isinstance(entry.parent.layer, keras.Model)
    )
