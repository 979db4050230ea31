"""Models that compute the same as another, with numbers that fit 16 bits."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_mixprec.formats import get_format
from keras_mixprec.inference.activations import largest_activations
from keras_mixprec.inference.clamp_outputs import clamp_outputs
from keras_mixprec.inference.rebuild import Rebuilder
from keras_mixprec.inference.rescale_weights import rescale_weights
from keras_mixprec.keras_internals import Functional
from keras_mixprec.policies.layers import walk


class Variant:
    """A model to convert, and what was changed in it to make numbers fit.

    Args:
        model: A built `keras.Model`, which is only read.
        batches: List of batches of inputs.

    Attributes:
        source: `Rebuilder` of it.
        reference: The model in float32.
        entries: List of its `LayerEntry`s, itself the last.
        rescaled: Dict from the paths of layers to the power of two by which
            their outputs are smaller.
        clamped: List of the paths of layers whose outputs are clamped.
        reasons: Dict from the path of each of these to a sentence.
        notes: List of sentences on operations that are no layers.
    """

    def __init__(self, model: keras.Model, batches: list[Any]):
        self.source = Rebuilder(model, batches[0])
        self.reference = self.source.reference
        self.entries = self.source.entries
        self.rescaled: dict[str, int] = {}
        self.clamped: list[str] = []
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []

    def largest(self, batches: list[Any]) -> dict[str, float]:
        """Returns what `largest_activations` returns of it."""
        return largest_activations(self.reference, self.entries, batches)

    def rescale(self, moved: dict[str, int]):
        """Notes which powers of two were moved between weights."""
        self.rescaled = moved
        for path, bits in moved.items():
            self.reasons[path] = (
                f"its weights have a factor of 2**{-bits} that the weights "
                "behind it take back; exact in float32"
            )

    def clamp(self, names: list[str], paths: list[str], limit: float):
        """Notes which operations are clamped.

        Args:
            names: List of the names of those that are no layers.
            paths: List of the paths of the layers.
            limit: Float. The largest number.
        """
        self.clamped = paths
        for path in paths:
            before = self.reasons.get(path)
            reason = f"outputs beyond {limit:g} are clamped, without effect"
            self.reasons[path] = f"{before}; {reason}" if before else reason
        self.notes += [
            f"The results of the operation {name!r} are clamped to {limit:g}, "
            "which changes no output in float32."
            for name in names
        ]


def variants(
    source: Rebuilder, batches: list[Any], dtype: str
) -> Iterator[Variant]:
    """Yields the model with powers of two moved, and then clamped as well.

    Each only if there is something to do: of a functional or `Sequential` model
    whose numbers do not fit the format.

    Args:
        source: `Rebuilder` of the model.
        batches: List of batches of inputs.
        dtype: String. The format.
    """
    # The config of a class of its own does not have its layers' epsilons.
    if type(source.reference) not in (Functional, keras.Sequential):
        return
    model = source.build({})
    moved = rescale_weights(model, batches, dtype)
    if moved:
        rescaled = Variant(model, batches)
        rescaled.rescale(moved)
        yield rescaled
    paths = {id(entry.layer): entry.path for entry in walk(model)}
    model, operations = clamp_outputs(model, batches, dtype)
    if operations:
        clamped = Variant(model, batches)
        clamped.rescale(moved)
        clamped.clamp(
            [x.name for x in operations if id(x) not in paths],
            [paths[id(x)] for x in operations if id(x) in paths],
            get_format(dtype).maximum,
        )
        yield clamped
