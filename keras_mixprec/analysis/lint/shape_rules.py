"""Rules about the sizes of matrix products."""

import math

from keras import layers

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.formats import format_share
from keras_mixprec.keras_internals import own_trainable

# What a side of a product has to be a multiple of: Tensor Cores read 16 bytes
# at once, which is 8 numbers of 16 bits and 16 of 8.
_MULTIPLE, _MULTIPLE_OF_8_BITS = 8, 16

# Of the multiply-adds: a layer that does less is no loss if it is slow.
_SHARE_THAT_MATTERS = 0.1

# Products with a shorter side spend their time reading memory: an A100 does
# 156 multiply-adds in 16 bits in the time in which it reads one number.
_SHORT_SIDE = 64

_CONVOLUTIONS = (
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
)
_CELLS = (layers.SimpleRNNCell, layers.LSTMCell, layers.GRUCell)


@rule("KMP603", "medium")
def dimension_not_multiple_of_8(view):
    """Tensor Cores take sides that are multiples of 8, of 16 in 8 bits."""
    for entry in view.entries:
        multiple = _multiple(view, entry)
        if multiple is None:
            continue
        sizes = {n for sides in _products(entry.layer) for n in sides}
        odd = {n: _padded(n, multiple) for n in sizes if n % multiple}
        if not odd:
            continue
        share = view.share(entry)
        padding = ", ".join(f"{n} to {to}" for n, to in sorted(odd.items()))
        yield Finding(
            "medium" if share >= _SHARE_THAT_MATTERS else "low",
            entry.path,
            f"Sides of its product are no multiple of {multiple}: "
            f"{', '.join(map(str, sorted(odd)))}; it does "
            f"{format_share(share)} of the model's multiply-adds.",
            # Fewer are often what the task has: classes, channels of an image.
            f"Pad {padding}{', if the task lets you' * (min(odd) < multiple)}.",
            numbers={"sizes": sorted(odd), "share": share}
            | {"padded": [odd[n] for n in sorted(odd)]},
        )


@rule("KMP604", "low")
def products_too_small(view):
    """Small products wait for memory, so that 16 bits make them no faster."""
    low = {id(entry.layer) for entry in view.low}
    sides = {
        entry.path: min(map(min, found))
        for entry in view.entries
        if id(entry.layer) in low and (found := _products(entry.layer))
    }
    shares = {e.path: view.share(e) for e in view.entries if e.path in sides}
    small = [path for path in sides if sides[path] < _SHORT_SIDE]
    share = sum(shares[path] for path in small)
    if share > 0.5:
        largest = max(small, key=shares.__getitem__)
        yield Finding(
            "low",
            None,
            f"{format_share(share)} of the multiply-adds are in products with "
            f"a side below {_SHORT_SIDE}, such as {largest!r} with "
            f"{sides[largest]}.",
            "Expect less memory in use, not more speed; larger layers and "
            "batches gain most.",
            numbers={"share": share, "layers": len(small)},
        )


def _multiple(view, entry):
    """Returns 8 or 16; `None` of a layer that computes in float32."""
    if entry.layer.quantization_mode in ("int8", "float8"):
        return _MULTIPLE_OF_8_BITS
    return _MULTIPLE if any(entry is low for low in view.low) else None


def _products(layer):
    """Returns the sides `(summed, free)` of a layer's weights as matrices."""
    if not layer.built:
        return []
    if isinstance(layer, layers.Dense):
        return [tuple(layer.kernel.shape)]
    if isinstance(layer, layers.EinsumDense):
        return [_einsum_sides(layer)]
    if isinstance(layer, _CONVOLUTIONS):
        return [tuple(layer.kernel.shape[-2:])]
    if isinstance(layer, _CELLS):
        return [tuple(w.shape) for w in own_trainable(layer)[:2]]
    return []


def _einsum_sides(layer):
    labels, kernel_labels = layer.equation.split("->")[0].split(",")
    summed, free = [], []
    for letter, size in zip(kernel_labels, layer.kernel.shape, strict=True):
        (summed if letter in labels else free).append(size)
    return math.prod(summed), math.prod(free)


def _padded(size, multiple):
    return math.ceil(size / multiple) * multiple
