"""Records the logits inside attention layers.

The attention layers of Keras and KerasHub pass their logits to an inner
`Softmax` layer or to `ops.softmax`. Or they pass query and key to
`ops.dot_product_attention`, as `MultiHeadAttention` does without dropout. That
function does not return its logits, so a measured step computes them a second
time.
"""

import math

import keras
from keras import ops

from keras_mixprec.numerics.layer_hooks import CallHook

# Logits below this limit are masked. Usual masks add -1e4, -1e9 or half of the
# format's lowest number.
_MASK = -1e4

# Logits with more elements than this (64 MiB) are not computed a second time.
_MOST = 2**24

# The size that an unknown dimension of a tensor is assumed to have.
_USUAL_BATCH = 64


def logits_hook(entries, on_call, put) -> CallHook:
    """Returns a hook on layer calls that also records attention logits.

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
    """Records the logits of each attention layer in one step.

    Args:
        entries: List of `LayerEntry`, the layers of the model.
        put: Function `(name, position, tensor)` that receives the logits.
            `name` is the name of the layer's call, and `position` counts the
            logits within the call.
    """

    def __init__(self, entries, put):
        self._softmaxes = {
            id(entry.layer) for entry in entries if _is_inside_layer(entry)
        }
        self._put = put
        self._counts = {}

    def of_softmax(self, layer, enclosing, args, kwargs):
        """Records the input of a `Softmax` inside a layer.

        Args:
            layer: The layer that is called.
            enclosing: String. The name of the enclosing layer call, or `None`.
            args: Tuple of its arguments.
            kwargs: Dict of its keyword arguments.
        """
        if id(layer) in self._softmaxes and enclosing is not None:
            self._take_unmasked(enclosing, [*args, *kwargs.values()][0])

    def of_function(self, function, layer, name, arguments):
        """Records the logits in a call to one of `layer_hooks.FUNCTIONS`.

        Args:
            function: String. The name of the function.
            layer: The layer that calls the function.
            name: String. The name of the layer's call.
            arguments: Dict of the function's arguments by name.
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
