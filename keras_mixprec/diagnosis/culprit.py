"""What a search finds."""

from typing import NamedTuple

from keras_mixprec.policies.layers import MODEL_PATH, walk_with_model


class Culprit(NamedTuple):
    """A layer at fault.

    Attributes:
        path: String. Its path.
        layers: List of the layers to demote: it alone, or all inside it too.
        kind: String. As in `Verdict`.
        direction: String. `"forward"` or `"backward"`.
        numbers: Dict. The evidence.
    """

    path: str
    layers: list
    kind: str
    direction: str
    numbers: dict

    def by_layer(self, model) -> list["Culprit"]:
        """Returns one for each layer, if these are inside of the one at fault.

        As where a model's own code computes in the dtype of what its layers
        return.

        Args:
            model: The `keras.Model`.
        """
        if self.path != MODEL_PATH or model in self.layers:
            return [self]
        paths = {id(e.layer): e.path for e in walk_with_model(model)}
        return [
            self._replace(path=paths[id(layer)], layers=[layer])
            for layer in self.layers
        ] or [self]
