"""What was measured of layers, by steps: the tables of one tag."""

import re

import numpy as np

# What follows the path of a layer in the name of a call but its first.
_SECOND_CALL = re.compile(r"#\d+$")


class Table:
    """Measurements of layers by step, of one tag.

    Args:
        content: Dict with the names of the rows as `"layers"`, and
            `"metrics"`, a dict from the names of the columns to `"min"` or
            `"max"`, whichever is the worse.
        points: List of `Point`.
    """

    def __init__(self, content, points):
        self.layers = content["layers"]
        self.metrics = content["metrics"]
        self.steps = np.array([point.step for point in points], "int64")
        self._points = points

    def column(self, metric: str, layers: list) -> np.ndarray:
        """Returns one metric of these layers.

        Args:
            metric: String.
            layers: List of strings, all of `self.layers` among them.

        Returns:
            Array `[steps, layers]`, NaN where nothing was measured. The
            headroom of a tensor with an infinity or a NaN is minus infinity:
            its finite elements alone would look sound.
        """
        own = self._values(metric)
        count = metric.removesuffix("headroom_bits") + "nonfinite"
        if metric.endswith("headroom_bits") and count in self.metrics:
            own = np.where(self._values(count) > 0, -np.inf, own)
        places = {name: place for place, name in enumerate(layers)}
        result = np.full((len(own), len(layers)), np.nan, "float32")
        result[:, [places[name] for name in self.layers]] = own
        return result

    def _values(self, metric):
        index = list(self.metrics).index(metric)
        return np.stack([point.array[:, index] for point in self._points])


def rows_in_order(tables: list, paths: list) -> list:
    """Returns the rows of all tables, layers in the order of the model.

    Args:
        tables: List of `Table`.
        paths: List of strings, the layers of the model.
    """
    # Those that the model does not have are in the order of the last table:
    # layers may have come and gone.
    rows = dict.fromkeys(row for t in reversed(tables) for row in t.layers)
    places = {path: place for place, path in enumerate(paths)}
    return sorted(
        rows, key=lambda row: places.get(layer_of(row, places), len(places))
    )


def layer_of(row: str, paths) -> str:
    """Returns the path of the layer whose call a row is.

    A layer that is used twice has the rows `path` and `path#1`.
    """
    return row if row in paths else _SECOND_CALL.sub("", row)
